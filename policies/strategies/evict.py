"""Old tool results leave a placeholder: what was asked, the finding in a line, where the full text is.

Without a scorer the oldest and largest go first, and the newest, worth half of what low water holds, stay. With
one, what it says is worth least goes, as little as the target takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.bounds import Bounds
from policies.candidates import DEFAULT_TYPES, candidates
from policies.draft import Draft
from policies.edits import replace_content
from policies.ledger import Edit, EditKind
from policies.messages import ToolCall
from policies.scoring import Block, scorer
from policies.scoring.selection import select
from policies.settings import ClientEdits
from policies.standins import standin

PROTECTED_SHARE = 0.5
WORTH_IT = 1.5
OWN_PARAMS = frozenset({"scorer", "types", "protect_steps"})


def evict(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with old content replaced by placeholders until it is at the layer's target or none is left."""
    if "scorer" in bounds.layer.params:
        return _by_score(draft, bounds)
    return _evicted(draft, bounds, _oldest_and_largest(draft, bounds))


def evictable(draft: Draft, bounds: Bounds) -> int:
    """The tokens of all that may be replaced by placeholders."""
    if "scorer" in bounds.layer.params:
        return sum(block.tokens for block in _blocks(draft, bounds))
    return sum(tokens for _, tokens in _oldest_and_largest(draft, bounds))


def evict_marked(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with what is marked ``keep: false`` replaced by placeholders, oldest first, down to low water."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    marked = [
        (p.index, p.tokens)
        for p in draft.pieces
        if p.index is not None and messages[p.index].keep is False and p.index not in guarded
    ]
    return _evicted(draft, bounds, [(i, tokens) for i, tokens in marked if not messages[i].call_ids])


def clear_results(draft: Draft, bounds: Bounds, edits: ClientEdits) -> Draft:
    """The draft without the tool results that its client asks to have cleared; as it was where too little would go."""
    messages, guarded, calls = draft.transcript.messages, bounds.protection.all, bounds.calls()
    standing = [p for p in draft.pieces if p.index is not None and messages[p.index].is_result and p.text is None]
    many = edits.results_over is not None and len(standing) > edits.results_over
    if not many and (edits.results_at is None or draft.tokens <= bounds.budget.room_for(edits.results_at)):
        return draft
    old = standing[: max(0, len(standing) - edits.keep)]
    chosen = [
        (p.index, p.tokens)
        for p in old
        if p.index is not None
        and p.index not in guarded
        and (p.index not in calls or calls[p.index].name not in edits.exclude)
    ]
    cleared = _evicted(draft, replace(bounds, aim=0), chosen)
    return cleared if draft.tokens - cleared.tokens >= bounds.budget.room_for(edits.at_least) else draft


def _by_score(draft: Draft, bounds: Bounds) -> Draft:
    params = bounds.layer.params
    judge = scorer(str(params["scorer"]), {k: v for k, v in params.items() if k not in OWN_PARAMS})
    blocks = _blocks(draft, bounds)
    calls = bounds.calls()
    edits: dict[int, Edit] = {}

    def cost(block: Block) -> int:
        edits[block.index] = edit = _edit(draft, bounds, block.index, calls)
        return edit.tokens

    chosen = select(
        [(block, judge.score(block)) for block in blocks],
        free=draft.tokens - bounds.target,
        cost=cost,
        band=judge.band,
    ).chosen
    return draft.with_edits({b.index: edits[b.index] for b in sorted(chosen, key=lambda b: b.index)})


def _blocks(draft: Draft, bounds: Bounds) -> list[Block]:
    """What a scorer may choose from."""
    params = bounds.layer.params
    stated, steps = params.get("types", DEFAULT_TYPES), bounds.layer.whole("protect_steps", 0)
    types = stated if isinstance(stated, tuple) else (str(stated),)
    return [b for b in candidates(draft, bounds, types=types) if b.age >= steps]


def _evicted(draft: Draft, bounds: Bounds, chosen: Sequence[tuple[int, int]]) -> Draft:
    excess = draft.tokens - bounds.target
    if excess <= 0 or not chosen:
        return draft
    calls = bounds.calls()
    edits: dict[int, Edit] = {}
    for index, tokens in chosen:
        edit = _edit(draft, bounds, index, calls)
        if edit.tokens * WORTH_IT > tokens:
            continue
        edits[index] = edit
        excess -= tokens - edit.tokens
        if excess <= 0:
            break
    return draft.with_edits(edits)


def _edit(draft: Draft, bounds: Bounds, index: int, calls: Mapping[int, ToolCall]) -> Edit:
    text = standin(bounds, index, calls)
    return replace_content(draft.transcript, index, text, kind=EditKind.EVICT, counter=bounds.counter)


def _oldest_and_largest(draft: Draft, bounds: Bounds) -> list[tuple[int, int]]:
    """Indices and tokens of the results that may go, by age times size."""
    messages = draft.transcript.messages
    budget = int(PROTECTED_SHARE * (bounds.target - bounds.fixed))
    found: list[tuple[int, int, int]] = []
    newest = len(messages)
    guarded = bounds.protection.all
    for piece in reversed(draft.pieces):
        index = piece.index
        if index is None or index in guarded or not bounds.in_scope(draft, piece):
            continue
        budget -= piece.tokens
        if budget < 0 and messages[index].is_result:
            found.append(((newest - index) * piece.tokens, index, piece.tokens))
    found.sort(key=lambda f: (-f[0], f[1]))
    return [(index, tokens) for _, index, tokens in found]
