"""Content goes, the message stays: with its role, and with the id of the call that it answers.

``evict``    old results leave what was asked, the finding in a line, and where the full text is
``prune``    the same for all results beyond a protected amount, if together they free enough
``dedupe``   a result that a newer one repeats or supersedes points at that
``media``    old images, recordings and files leave a line that says what they were; their text stays
``reasoning`` thinking of earlier turns is left out: providers ignore it there, and it is paid for on every request
``prune_tools`` definitions of tools that nobody uses are left out while they take more than their bucket holds
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from policies.draft import (
    MESSAGE_OVERHEAD,
    Bounds,
    Draft,
    Strategy,
    down_to_target,
    placeholder_for,
    touchable,
    whole,
    word,
    words,
)
from policies.ledger import CONDENSED, SHORTENED, Edit, EditKind, PlannedMessage
from policies.messages import ToolDefinition, Tools, parse_turn_boundaries, step_numbers
from policies.settings import ClientEdits, Param
from policies.strategies.redundancy import References, last_references
from policies.strategies.scorers import SCORERS, Block, ContentType, select
from policies.text.segments import replaced_in

WORTH_IT = 1.5
PROTECTED_SHARE = 0.5
MIN_DUPLICATE = 40
CLEARED = frozenset({EditKind.PRUNE, EditKind.EVICT, EditKind.DEDUPE, EditKind.MERGE, EditKind.CUSTOM})
IMPORTANT = "IMPORTANT"
DEFAULT_TYPES = ("tool_result", "memory")
BRIEF = 100
NEVER = -1
NAME_WEIGHT = 2
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD = re.compile(r"[^\W_]{2,}|\d")


def cleared(bounds: Bounds, index: int, kind: EditKind) -> Edit:
    return bounds.edited(index, placeholder_for(bounds, index), kind)


def evict_marked(draft: Draft, bounds: Bounds) -> Draft:
    marked = (p for _, p, message in touchable(draft, bounds) if message.keep is False and not message.call_ids)
    return _evicted(draft, bounds, marked)


def clear_results(draft: Draft, bounds: Bounds, edits: ClientEdits) -> Draft:
    """The draft without the tool results that its client asks to have cleared; as it was where too little would go."""
    messages, guarded, calls = draft.transcript.messages, bounds.protection.all, bounds.transcript.calls
    standing = [p for p in draft.pieces if p.index is not None and messages[p.index].is_result and p.text is None]
    many = edits.results_over is not None and len(standing) > edits.results_over
    if not many and (edits.results_at is None or draft.tokens <= bounds.budget.room_for(edits.results_at)):
        return draft
    old = [p for p in standing[: max(0, len(standing) - edits.keep)] if p.index not in guarded]
    chosen = [p for p in old if p.index not in calls or calls[p.index].name not in edits.exclude]
    done = _evicted(draft, replace(bounds, aim=0), chosen)
    return done if draft.tokens - done.tokens >= bounds.budget.room_for(edits.at_least) else draft


def _evicted(draft: Draft, bounds: Bounds, chosen: Iterable[PlannedMessage]) -> Draft:
    made = ((piece, cleared(bounds, piece.index or 0, EditKind.EVICT)) for piece in chosen)
    return down_to_target(draft, bounds, ((piece, e) for piece, e in made if e.tokens * WORTH_IT <= piece.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Strategy):
    """Old results leave a placeholder.

    Without a ``scorer`` the oldest and largest go first, and the newest, worth half of what low water holds, stay. With
    one (``given`` are its own parameters) what it says is worth least goes. The task, the newest and brief words of
    the user never go, nor the assistant's.
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
        return replace(base, given={name: value for name, value in params.items() if name not in own})

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        return self._by_score(draft, bounds) if self.scorer else _evicted(draft, bounds, _by_age(draft, bounds))

    def scan(self, draft: Draft, bounds: Bounds) -> int:
        return sum(each.tokens for each in (self._blocks(draft, bounds) if self.scorer else _by_age(draft, bounds)))

    def _by_score(self, draft: Draft, bounds: Bounds) -> Draft:
        edits: dict[int, Edit] = {}

        def cost(block: Block) -> int:
            edits[block.index] = cleared(bounds, block.index, EditKind.EVICT)
            return edits[block.index].tokens

        scorer = SCORERS[self.scorer].of(self.given)
        chosen = select(self._blocks(draft, bounds), scorer, free=draft.tokens - bounds.target, cost=cost)
        return draft.with_edits({index: edits[index] for index in sorted(block.index for block in chosen)})

    def _blocks(self, draft: Draft, bounds: Bounds) -> list[Block]:
        return [b for b in candidates(draft, bounds, types=self.types) if b.age >= self.protect_steps]


def _by_age(draft: Draft, bounds: Bounds) -> list[PlannedMessage]:
    budget = int(PROTECTED_SHARE * (bounds.target - bounds.fixed))
    found: list[tuple[int, int, PlannedMessage]] = []
    for index, piece, message in reversed([*touchable(draft, bounds)]):
        budget -= piece.tokens
        if budget < 0 and message.is_result:
            found.append((-(len(draft.transcript.messages) - index) * piece.tokens, index, piece))
    return [piece for _, _, piece in sorted(found, key=lambda f: f[:2])]


def candidates(draft: Draft, bounds: Bounds, *, types: tuple[str, ...] = DEFAULT_TYPES) -> list[Block]:
    transcript, calls = draft.transcript, bounds.transcript.calls
    steps, used = step_numbers(transcript.messages), last_references(transcript, calls)
    replaced = replaced_in(calls, lambda index: transcript.read(index).text)
    found: list[Block] = []
    for index, piece, message in touchable(draft, bounds):
        kind = _kind(draft, index)
        is_taken = piece.text is not None and piece.kind not in SHORTENED | CONDENSED
        if is_taken or kind is None or kind not in types:
            continue
        if kind is ContentType.USER and message.tokens <= BRIEF:
            continue
        age, reference = steps[-1] - steps[index], used.get(index, References())
        found.append(
            Block(
                index=index,
                kind=kind,
                tokens=piece.tokens,
                age=age,
                idle=age if reference.step is None else steps[-1] - reference.step,
                references=reference.count,
                worthless=index in replaced or message.keep is False,
                important=kind is not ContentType.TOOL_RESULT and IMPORTANT in transcript.read(index).text,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune(Strategy):
    """Results beyond the newest ``protect`` tokens are cleared together, if that gains more than ``minimum``.

    The latest ``skip_turns`` turns are not added up. ``straddle`` says what becomes of the result in which ``protect``
    ends.
    """

    name = "prune"
    protect: int = whole(40_000)
    minimum: int = whole(20_000)
    skip_turns: int = whole(2)
    straddle: str = word("keep", "clear", default="keep")

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        old = self._beyond(draft, bounds)
        if sum(piece.tokens for _, piece in old) <= self.minimum:
            return draft
        made = ((index, piece, cleared(bounds, index, EditKind.PRUNE)) for index, piece in old)
        pruned = draft.with_edits({index: edit for index, piece, edit in made if edit.tokens < piece.tokens})
        return pruned if draft.tokens - pruned.tokens > self.minimum else draft

    def scan(self, draft: Draft, bounds: Bounds) -> int:
        return sum(piece.tokens for _, piece in self._beyond(draft, bounds))

    def _beyond(self, draft: Draft, bounds: Bounds) -> list[tuple[int, PlannedMessage]]:
        messages, guarded = draft.transcript.messages, bounds.protection.all
        turns = parse_turn_boundaries(messages)
        stop = turns[-self.skip_turns] if 0 < self.skip_turns < len(turns) else len(messages)
        found: list[tuple[int, PlannedMessage]] = []
        total = 0
        for piece in reversed(draft.pieces):
            index = piece.index
            if index is None or index >= stop or not messages[index].is_result or not bounds.in_scope(draft, piece):
                continue
            newer, total = total, total + piece.tokens
            if not (total > self.protect if self.straddle == "clear" else newer >= self.protect):
                continue
            if index not in guarded and piece.kind not in CLEARED:
                found.append((index, piece))
        return found[::-1]


class Dedupe(Strategy):
    """Results become one line where a newer one has the same digest or replaced them: they are stale."""

    name = "dedupe"

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        messages, calls, guarded = draft.transcript.messages, bounds.transcript.calls, bounds.protection.all
        newest: dict[bytes, int] = {}
        replaced = replaced_in(calls, lambda index: draft.transcript.read(index).text)
        edits: dict[int, Edit] = {}
        for piece in reversed(draft.pieces):
            index = piece.index
            if index is None or not messages[index].is_result:
                continue
            message = messages[index]
            duplicate = newest.setdefault(message.digest, index) != index
            if not (duplicate or index in replaced) or piece.text is not None or piece.tokens < MIN_DUPLICATE:
                continue
            if message.keep or index in guarded:
                continue
            why = "the same result comes again later" if duplicate else "a later call of the same tool replaced it"
            edit = bounds.edited(index, f"[weir: removed, {why}; archived as {message.ref}]", EditKind.DEDUPE)
            if edit.tokens < piece.tokens:
                edits[index] = edit
        return draft.with_edits(edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireMedia(Strategy):
    """Old images, recordings and files leave a line that says what they were and where the original is.

    The ``keep`` newest messages that carry any stay: what is not sent any more cannot be looked at again.
    """

    name = "media"
    keep: int = whole(1)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        media = {i for i, message in enumerate(draft.transcript.messages) if message.media}
        carrying = [p for p in draft.pieces if p.text is None and p.index in media]
        newest = {p.index for p in carrying[max(0, len(carrying) - self.keep) :]}
        old = [p for i, p, message in touchable(draft, bounds) if p.text is None and message.media and i not in newest]
        made = ((piece, without_media(bounds, piece.index or 0)) for piece in old)
        return down_to_target(
            draft, bounds, ((p, edit) for p, edit in made if edit is not None and edit.tokens < p.tokens)
        )


def without_media(bounds: Bounds, index: int) -> Edit | None:
    """The edit that leaves a line for each image or file of message ``index``; None where they cannot be told apart."""
    body, ref, count = bounds.transcript.read(index), bounds.transcript.messages[index].ref, bounds.counter.count
    if not body.attached or len(body.attached) != body.media or body.calls:
        return None
    lines = [f"[weir: {what} left out; archived as {ref}]" for what in body.attached]
    name = 1 + count(body.name) if body.name else 0
    tokens = MESSAGE_OVERHEAD + name + count(body.whole) + sum(map(count, lines))
    return replace(bounds.edited(index, "\n".join(lines), EditKind.MEDIA), tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Strategy):
    """Thinking of earlier turns is left out of assistant messages that are ``ttl`` steps old; text and calls stay.

    It stays in every message after the last thing that the user said, because servers refuse or degrade a tool loop
    whose thinking is missing (DeepSeek, Kimi, MiniMax, Anthropic's signed blocks), and where nothing else is said.
    """

    name = "reasoning"
    ttl: int = whole(2)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        transcript = draft.transcript
        steps, read = step_numbers(transcript.messages), transcript.read
        users = [i for i, message in enumerate(transcript.messages) if message.role == "user"]
        # results that stand in the user role are no new turn
        end = next((i for i in reversed(users) if read(i).whole.strip()), 0)
        edits: dict[int, Edit] = {}
        for index, piece, message in touchable(draft, bounds):
            is_old = index < end and steps[-1] - steps[index] >= self.ttl
            if not is_old or piece.text is not None or message.role != "assistant":
                continue
            body = read(index)
            if not body.reasoning or not (body.text.strip() or body.calls):
                continue
            left = max(MESSAGE_OVERHEAD, piece.tokens - bounds.counter.count(body.reasoning))
            if left < piece.tokens:
                edits[index] = replace(bounds.edited(index, "", EditKind.REASONING), tokens=left)
        return draft.with_edits(edits)


def leave_out_unbound(draft: Draft, bounds: Bounds, *, all_of_it: bool = False) -> Draft:
    """The draft without the thinking that stands behind the first thing that is new in it, or without any.

    The newest Claude models sign a thought for what stood before it, and refuse it behind anything else
    (platform.claude.com, "Preserved thinking"). What they think from now on is valid as long as the edits hold.
    """
    same = 0
    if not all_of_it and not draft.tool_edits:
        pairs = zip(draft.pieces, bounds.standing, strict=False)
        same = next((n for n, (new, old) in enumerate(pairs) if new != old), len(bounds.standing))
    edits: dict[int, Edit] = {}
    for piece in draft.pieces[same:]:
        if piece.index is None or piece.text is not None:
            continue
        message = draft.transcript.messages[piece.index]
        if message.thought:
            left = max(MESSAGE_OVERHEAD, piece.tokens - message.thought)
            edits[piece.index] = replace(bounds.edited(piece.index, "", EditKind.UNBOUND), tokens=left)
    return draft.with_edits(edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneTools(Strategy):
    """The least used definitions go: first those never called, then those called longest ago.

    What the newest user message speaks of goes last. ``steps`` newest steps count as use; of the never called ``top_k``
    are kept. What is left out is decided once: the tools stand in front of all that the provider's cache could hold.
    Never left out are a tool that the request names, one whose call is in the history that is sent, and the last one.
    """

    name = "prune_tools"
    steps: int = whole(10)
    top_k: int | None = whole(None)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        excess = draft.tokens - bounds.target
        cap = bounds.budget.caps.get("tools")
        if excess <= 0 or not draft.tools or (cap is not None and draft.tools <= bounds.budget.room_for(cap)):
            return draft
        tools = bounds.transcript.read_tools()
        pruned = {definition.name for definition in draft.pruned}
        sent = [definition for definition in tools.definitions if definition.name not in pruned]
        chosen = self._chosen(self._dispensable(draft, tools, sent), bounds, excess=excess)[: len(sent) - 1]
        dropped = {definition.name for definition in chosen}
        gone = [definition for definition in sent if definition.name in dropped]
        kind = EditKind.PRUNE_TOOLS
        return draft.with_tools_pruned(gone, [Edit(d.digest, 0, kind, "", d.digest.hex()[:12], 0) for d in gone])

    def _dispensable(
        self, draft: Draft, tools: Tools, sent: Sequence[ToolDefinition]
    ) -> list[tuple[int, ToolDefinition]]:
        visible = {piece.index for piece in draft.pieces}
        calling = [i for i, message in enumerate(draft.transcript.messages) if message.call_ids]
        recent = set(calling[-self.steps :]) if self.steps > 0 else set[int]()
        last: dict[str, int] = {}
        needed = set(tools.chosen)
        for index in calling:
            for call in draft.transcript.read(index).calls:
                last[call.name] = index
                if index in visible or index in recent:
                    needed.add(call.name)
        return [(last.get(d.name, NEVER), d) for d in sent if d.name not in needed]

    def _chosen(
        self, dispensable: list[tuple[int, ToolDefinition]], bounds: Bounds, *, excess: int
    ) -> list[ToolDefinition]:
        unused = _least_relevant_first([d for used, d in dispensable if used == NEVER], bounds)
        used = [d for _, d in sorted(((at, d) for at, d in dispensable if at != NEVER), key=lambda found: found[0])]
        at_once = 0 if self.top_k is None else max(0, len(unused) - self.top_k)
        found: list[ToolDefinition] = []
        for definition in (*unused, *used):
            if excess <= 0 and len(found) >= at_once:
                break
            found.append(definition)
            excess -= definition.tokens
        return found


def _least_relevant_first(definitions: Sequence[ToolDefinition], bounds: Bounds) -> list[ToolDefinition]:
    current = bounds.protection.current
    asked = _words(bounds.transcript.read(current).text) if current is not None else frozenset[str]()
    names = [_words(d.name) & asked for d in definitions]
    texts = [_words(d.description) & asked | name for d, name in zip(definitions, names, strict=True)]
    holders: dict[str, int] = {}
    for term in (term for terms in texts for term in terms):
        holders[term] = holders.get(term, 0) + 1
    scores = [
        sum((NAME_WEIGHT if term in name else 1) / holders[term] for term in sorted(terms))
        for name, terms in zip(names, texts, strict=True)
    ]
    return [definitions[i] for i in sorted(range(len(definitions)), key=lambda i: (scores[i], -i))]


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(_HUMP.sub(" ", text)))
