"""``evict``: old results are reduced to the call, the finding in a line, and where the full text
is.

What a client marks as the first to go, and what it itself wants cleared, goes in the same way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from policies.draft import (
    Bounds,
    Draft,
    Strategy,
    cleared,
    down_to_target,
    touchable,
    whole,
    word,
    words,
)
from policies.ledger import CONDENSED, SHORTENED, Edit, EditKind, PlannedMessage
from policies.messages import step_numbers
from policies.settings import ClientEdits, Param
from policies.strategies.redundancy import References, last_references
from policies.strategies.scorers import SCORERS, Block, ContentType, select
from policies.text.segments import replaced_in

WORTH_IT = 1.5


PROTECTED_SHARE = 0.5


IMPORTANT = "IMPORTANT"


DEFAULT_TYPES = ("tool_result", "memory")


BRIEF = 100


def evict_marked(draft: Draft, bounds: Bounds) -> Draft:
    marked = (
        p
        for _, p, message in touchable(draft, bounds)
        if message.keep is False and not message.call_ids
    )
    return _evicted(draft, bounds, marked)


def clear_results(draft: Draft, bounds: Bounds, edits: ClientEdits) -> Draft:
    """The draft without the tool results that its client wants cleared; unchanged where too little
    would go.
    """
    messages = draft.transcript.messages
    guarded = bounds.protection.all
    calls = bounds.transcript.calls
    standing = [
        p
        for p in draft.pieces
        if p.index is not None and messages[p.index].is_result and p.text is None
    ]
    many = edits.results_over is not None and len(standing) > edits.results_over
    if not many and (
        edits.results_at is None or draft.tokens <= bounds.budget.room_for(edits.results_at)
    ):
        return draft
    old = [p for p in standing[: max(0, len(standing) - edits.keep)] if p.index not in guarded]
    chosen = [p for p in old if p.index not in calls or calls[p.index].name not in edits.exclude]
    done = _evicted(draft, replace(bounds, aim=0), chosen)
    return done if draft.tokens - done.tokens >= bounds.budget.room_for(edits.at_least) else draft


def _evicted(draft: Draft, bounds: Bounds, chosen: Iterable[PlannedMessage]) -> Draft:
    made = ((piece, cleared(bounds, piece.index or 0, EditKind.EVICT)) for piece in chosen)
    return down_to_target(
        draft, bounds, ((piece, e) for piece, e in made if e.tokens * WORTH_IT <= piece.tokens)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Strategy):
    """Old results leave a placeholder.

    Without a ``scorer`` the oldest and largest go first, and the newest, worth half of what low
    water holds, stay. With one (``given`` are its own parameters) the lowest scores go. The task,
    the newest and brief words of the user never go, nor the assistant's.
    """

    name = "evict"
    scorer: str = word(*SCORERS)
    types: tuple[str, ...] = words("tool_result", "memory", "user", default=DEFAULT_TYPES)
    protect_steps: int = whole(0)
    given: Mapping[str, Param] = field(default_factory=dict)

    @classmethod
    def of(cls, params: Mapping[str, Param]) -> Self:
        """The strategy; what is not its own parameter is the scorer's."""
        own = {"scorer", "types", "protect_steps"}
        base = super(Evict, cls).of({name: value for name, value in params.items() if name in own})
        return replace(
            base, given={name: value for name, value in params.items() if name not in own}
        )

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        return (
            self._by_score(draft, bounds)
            if self.scorer
            else _evicted(draft, bounds, _by_age(draft, bounds))
        )

    def scan(self, draft: Draft, bounds: Bounds) -> int:
        return sum(
            each.tokens
            for each in (self._blocks(draft, bounds) if self.scorer else _by_age(draft, bounds))
        )

    def _by_score(self, draft: Draft, bounds: Bounds) -> Draft:
        edits: dict[int, Edit] = {}

        def cost(block: Block) -> int:
            edits[block.index] = cleared(bounds, block.index, EditKind.EVICT)
            return edits[block.index].tokens

        scorer = SCORERS[self.scorer].of(self.given)
        chosen = select(
            self._blocks(draft, bounds), scorer, free=draft.tokens - bounds.target, cost=cost
        )
        return draft.with_edits(
            {index: edits[index] for index in sorted(block.index for block in chosen)}
        )

    def _blocks(self, draft: Draft, bounds: Bounds) -> list[Block]:
        return [
            b for b in candidates(draft, bounds, types=self.types) if b.age >= self.protect_steps
        ]


def _by_age(draft: Draft, bounds: Bounds) -> list[PlannedMessage]:
    budget = int(PROTECTED_SHARE * (bounds.target - bounds.fixed))
    found: list[tuple[int, int, PlannedMessage]] = []
    for index, piece, message in reversed([*touchable(draft, bounds)]):
        budget -= piece.tokens
        if budget < 0 and message.is_result:
            found.append((-(len(draft.transcript.messages) - index) * piece.tokens, index, piece))
    return [piece for _, _, piece in sorted(found, key=lambda f: f[:2])]


def candidates(
    draft: Draft, bounds: Bounds, *, types: tuple[str, ...] = DEFAULT_TYPES
) -> list[Block]:
    transcript = draft.transcript
    calls = bounds.transcript.calls
    steps = step_numbers(transcript.messages)
    used = last_references(transcript, calls)
    replaced = replaced_in(calls, lambda index: transcript.read(index).text)
    found: list[Block] = []
    for index, piece, message in touchable(draft, bounds):
        kind = _kind(draft, index)
        is_taken = piece.text is not None and piece.kind not in SHORTENED | CONDENSED
        if is_taken or kind is None or kind not in types:
            continue
        if kind is ContentType.USER and message.tokens <= BRIEF:
            continue
        age = steps[-1] - steps[index]
        reference = used.get(index, References())
        found.append(
            Block(
                index=index,
                kind=kind,
                tokens=piece.tokens,
                age=age,
                idle=age if reference.step is None else steps[-1] - reference.step,
                references=reference.count,
                worthless=index in replaced or message.keep is False,
                important=kind is not ContentType.TOOL_RESULT
                and IMPORTANT in transcript.read(index).text,
                behind=len(transcript.messages) - index,
            )
        )
    return found


def _kind(draft: Draft, index: int) -> ContentType | None:
    message = draft.transcript.messages[index]
    if index in draft.transcript.memory:
        return ContentType.MEMORY
    if message.is_result:
        return ContentType.TOOL_RESULT
    return ContentType.USER if message.role == "user" else None
