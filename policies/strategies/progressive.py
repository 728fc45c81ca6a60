"""What was said long ago is said in fewer words: by age in steps, and always anew from what was said.

=====  ==============  =================================================
level  age in steps    what stays
=====  ==============  =================================================
0      0               everything
1      1 to 5          about 30 %
2      6 to 20         about 5 %
3      from 21 on      a title, about 1 % and ten tokens at the least
=====  ==============  =================================================

Levels move only when the layer runs, the oldest first and as far as its target takes, so that the prefix that is sent
stays as it is between two batches. Calls stay in any case. What a user said is never put in other words: a message
that is not long stays, of a long one the telling sentences, at level 1 at the least.
"""

import re
from collections.abc import Mapping, Sequence

from policies.bounds import Bounds
from policies.condensing import MOST_ASKED, Job, condense_each, may_ask
from policies.draft import Draft
from policies.effects import Flow
from policies.ledger import SHORTENED, EditKind
from policies.messages import ToolCall
from policies.pieces import Piece
from policies.scoring.blocks import step_numbers
from policies.summary import Line
from policies.text.gist import gist

L1_UNTIL = 5
L2_UNTIL = 20
SHARES = (1.0, 0.30, 0.05, 0.01)
"""By level, the share of what was said that stays."""
LEAST = 10
LEAST_ASKED = 16
"""Tokens that a model has for a title at the least: names are cut otherwise."""
WORTH_IT = 0.6
"""The share of what stands there now that a level must not be above: a short message says little without its words."""
LONG = 200
"""Tokens of a user's message that may be cut to its telling sentences."""
WORTH_ASKING = 200
"""Tokens of a message from which on a model is asked; of a shorter one code says as much."""
REPLACES = SHORTENED | {EditKind.SUMMARY, EditKind.DELEGATE, EditKind.PROGRESSIVE}
_LEVEL = re.compile(r"\[weir: level ([123]), [^\[\]]{1,80}\]\Z")


def level_of(age: int, *, l1_until: int = L1_UNTIL, l2_until: int = L2_UNTIL) -> int:
    """The level of what was said ``age`` steps ago: 0 in full, 3 a title."""
    if age <= 0:
        return 0
    if age <= l1_until:
        return 1
    return 2 if age <= l2_until else 3


def progressive(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft with answers, results and user messages at the level of their age, until it is at the layer's target.

    Params: ``l1_until`` and ``l2_until``, the last age in steps of the levels 1 and 2.
    """
    calls = bounds.calls()
    jobs = _jobs(draft, bounds, calls)

    def plain(job: Job) -> str:
        return _in_its_own_words(job, bounds, calls.get(job.index))

    return (yield from condense_each(draft, bounds, jobs, plain=plain))


def _jobs(draft: Draft, bounds: Bounds, calls: Mapping[int, ToolCall]) -> list[Job]:
    """What is not at the level of its age, oldest first; a model is asked about the largest of it."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    steps = step_numbers(messages)
    until = {"l1_until": bounds.layer.whole("l1_until", L1_UNTIL), "l2_until": bounds.layer.whole("l2_until", L2_UNTIL)}
    jobs: list[Job] = []
    for piece in draft.pieces:
        index = piece.index
        if index is None or index in guarded or index in draft.transcript.memory or messages[index].media:
            continue
        level = level_of(steps[-1] - steps[index], **until)
        level = min(level, 1) if messages[index].role == "user" else level
        if level <= level_now(piece) or not bounds.in_scope(draft, piece):
            continue
        job = _job(draft, bounds, piece, index, level, calls.get(index))
        if job is not None:
            jobs.append(job)
    return _asking_about_the_largest(jobs, draft)


def level_now(piece: Piece) -> int:
    """The level at which a message stands in the array; 3 where something else stands in its place."""
    if piece.text is None:
        return 0
    if piece.kind not in REPLACES:
        return 3
    match = _LEVEL.search(piece.text) if piece.kind is EditKind.PROGRESSIVE else None
    return int(match.group(1)) if match else 0


def _job(draft: Draft, bounds: Bounds, piece: Piece, index: int, level: int, call: ToolCall | None) -> Job | None:
    """How one message gets to a level; None where it would not get much shorter."""
    message, text = draft.transcript.messages[index], draft.transcript.read(index).text
    if message.role not in {"user", "assistant"} and not message.is_result:
        return None
    tokens = bounds.counter.count(text)
    asks = message.role != "user" and tokens >= WORTH_ASKING and may_ask(bounds)
    allowed = max(LEAST_ASKED if asks else LEAST, int(SHARES[level] * tokens))
    tail = f"[weir: level {level}, archived as {message.ref}]"
    if message.role == "user" and tokens < LONG:
        return None
    kept = piece.tokens - bounds.counter.count(text if piece.text is None else piece.text)
    if kept + allowed + bounds.counter.count(tail) > WORTH_IT * piece.tokens:
        return None
    origin = (f"result of {call.name}" if call else "tool result") if message.is_result else message.role
    return Job(
        index=index,
        kind=EditKind.PROGRESSIVE,
        allowed=allowed,
        tail=tail,
        key=f"{message.digest.hex()}:{level}",
        prompt=f"level_{level}",
        lines=(Line(origin, text),),
        asks=asks,
    )


def _asking_about_the_largest(jobs: Sequence[Job], draft: Draft) -> list[Job]:
    """The jobs with no more questions than one run may ask; of the others code says what there is to say."""
    messages = draft.transcript.messages
    asking = sorted((job for job in jobs if job.asks), key=lambda job: (-messages[job.index].tokens, job.index))
    spared = {job.index for job in asking[MOST_ASKED:]}
    return [job.without_asking() if job.index in spared else job for job in jobs]


def _in_its_own_words(job: Job, bounds: Bounds, call: ToolCall | None) -> str:
    """What code says of a message at a level."""
    message, text = bounds.transcript.messages[job.index], bounds.transcript.read(job.index).text
    return gist(
        text,
        role="tool" if message.is_result else message.role,
        known=f"{call.name} {call.arguments}" if call else "",
        max_tokens=job.allowed,
        counter=bounds.counter,
    )
