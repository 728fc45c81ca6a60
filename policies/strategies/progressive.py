"""``progressive``: old messages are shortened in steps, by age."""

import re
from dataclasses import dataclass, replace
from functools import partial

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, Strategy, touchable, whole
from policies.effects import Flow
from policies.ledger import SHORTENED, EditKind, PlannedMessage
from policies.lines import DATA, beside_data
from policies.messages import Body, ToolCall, step_numbers
from policies.strategies.rewrite import (
    MAX_ASKED,
    RewriteTask,
    call_in_words,
    condense_each,
    may_ask,
    result_origin,
)
from policies.summary.material import MaterialLine
from policies.text.gist import gist
from policies.tokens import TokenCounter

SHARES = (1.0, 0.30, 0.05, 0.01)
"""By level, the share of the original that stays."""


MIN_TITLE = 10


MIN_ASKED = 16
"""Minimum tokens that a model has for a title: with fewer, names are cut."""


WORTH_IT = 0.6
"""The maximum size of a level as a share of the current text: a short message says little without
its words.
"""


LONG = 200
"""Tokens of a user's message that may be cut to its most informative sentences."""


WORTH_ASKING = 200
"""Tokens of a message from which on a model is called; for a shorter one code says as much."""


REPLACES = SHORTENED | {EditKind.SUMMARY, EditKind.DELEGATE, EditKind.PROGRESSIVE}


_LEVEL = re.compile(r"\[weir: level ([123]), [^\[\]]{1,80}\]\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressive(Strategy):
    """Old messages take about 30 %, after ``l1_until`` steps 5 %, after ``l2_until`` a title.

    Levels move only when the layer runs, so that the sent prefix stays between two batches. Calls
    stay. What a user said is never put in other words: of a long message the most informative
    sentences stay, at level 1 at the least.
    """

    name = "progressive"
    asks_model = costs = True
    l1_until: int = whole(5)
    l2_until: int = whole(20)

    def level_of(self, age: int) -> int:
        """The level of what was said ``age`` steps ago."""
        return (
            (age > 0)
            + (age > 0 and age > self.l1_until)
            + (age > 0 and age > max(self.l1_until, self.l2_until))
        )

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        return condense_each(draft, bounds, self._jobs(draft, bounds))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        messages = draft.transcript.messages
        calls = draft.transcript.calls
        steps = step_numbers(messages)
        jobs: list[RewriteTask] = []
        for index, piece, message in touchable(draft, bounds):
            if index in draft.transcript.memory or message.media:
                continue
            level = self.level_of(steps[-1] - steps[index])
            level = min(level, 1) if message.role == "user" else level
            job = (
                _at_level(bounds, piece, index, level, calls.get(index))
                if level > level_now(piece)
                else None
            )
            jobs += [job] if job is not None else []
        asking = sorted(
            (job for job in jobs if job.asks),
            key=lambda job: (-messages[job.index].tokens, job.index),
        )
        spared = {job.index for job in asking[MAX_ASKED:]}
        return [replace(job, asks=False) if job.index in spared else job for job in jobs]


def level_now(piece: PlannedMessage) -> int:
    """The level of a message in the array; 3 where something else replaces it."""
    if piece.text is None:
        return 0
    if piece.kind not in REPLACES:
        return 3
    match = _LEVEL.search(piece.text) if piece.kind is EditKind.PROGRESSIVE else None
    return int(match.group(1)) if match else 0


def _at_level(
    bounds: Bounds, piece: PlannedMessage, index: int, level: int, call: ToolCall | None
) -> RewriteTask | None:
    message = bounds.transcript.messages[index]
    count = bounds.counter.count
    body = bounds.transcript.read(index)
    text = body.whole
    if message.role not in {"user", "assistant"} and not message.is_result:
        return None
    tokens = count(text)
    if message.role == "user" and tokens < LONG:
        return None
    asks = message.role != "user" and tokens >= WORTH_ASKING and may_ask(bounds)
    allowed = max(MIN_ASKED if asks else MIN_TITLE, int(SHARES[level] * tokens))
    tail = f"[weir: level {level}, archived as {message.ref}]"
    beside = piece.tokens - count(text if piece.text is None else piece.text)
    if beside + allowed + count(tail) > WORTH_IT * piece.tokens:
        return None
    role = "tool" if message.is_result else message.role
    return RewriteTask(
        index=index,
        kind=EditKind.PROGRESSIVE,
        allowed=allowed,
        tail=tail,
        key=f"{message.digest.hex()}:{level}",
        prompt=f"level_{level}",
        lines=(
            MaterialLine(result_origin(call) if message.is_result else message.role, body.text),
            *((MaterialLine(DATA, body.data),) if body.data else ()),
        ),
        plain=partial(
            _telling,
            body,
            role=role,
            known=call_in_words(call),
            most=allowed,
            counter=bounds.counter,
        ),
        asks=asks,
    )


def _telling(body: Body, *, role: str, known: str, most: int, counter: TokenCounter) -> str:
    said = gist(body.text, role=role, known=known, max_tokens=most, counter=counter)
    left = most - counter.count(said) - MESSAGE_OVERHEAD
    return (
        beside_data(said, gist(body.data, known=known, max_tokens=left, counter=counter))
        if body.data
        else said
    )
