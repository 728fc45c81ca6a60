"""Results of one tool that say nearly the same become one: the latest stays and says what changed, the others go.

Whether two of them are alike is asked for (shingles, or the vectors of a model that the policy names). Equal ones
need no asking, and where the answer does not come nothing else is merged.
"""

from collections.abc import Mapping, Sequence

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import replace_content
from policies.effects import Alike, Compare, Flow
from policies.ledger import Edit, EditKind
from policies.messages import ToolCall
from policies.scoring.duplication import THRESHOLD, Group, Merge, Output, candidate_groups, merge
from policies.standins import standin


def semantic_merge(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft with results that are more alike than ``threshold`` (a param) merged, where that saves tokens."""
    calls = bounds.calls()
    groups = candidate_groups(_outputs(draft, bounds, calls))
    if not groups:
        return draft
    stated = bounds.layer.params.get("threshold", THRESHOLD)
    threshold = float(stated) if isinstance(stated, int | float) else THRESHOLD
    similarities = yield from _compared(groups, bounds.settings.embeddings)
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    edits: dict[int, Edit] = {}
    for found in merge(groups, similarities, threshold=threshold):
        merged = _edits(bounds, found, calls)
        if sum(e.tokens for e in merged.values()) < sum(tokens[i] for i in merged):
            edits |= merged
    return draft.with_edits(edits)


def _outputs(draft: Draft, bounds: Bounds, calls: Mapping[int, ToolCall]) -> list[Output]:
    """The results that may be merged: answers to a call, unprotected, in scope, not replaced, without media."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    found: list[Output] = []
    for piece in draft.pieces:
        index = piece.index
        if index is None or index not in calls or index in guarded or piece.text is not None:
            continue
        if not messages[index].media and bounds.in_scope(draft, piece):
            found.append(Output(index, calls[index].name, draft.transcript.read(index).text))
    return found


def _compared(groups: Sequence[Group], model: str | None) -> Flow[dict[tuple[int, int], float]]:
    """How alike each pair of the groups is, by the indices of its messages; empty where nobody can say."""
    pairs = [pair for group in groups for pair in group.pairs]
    if not pairs:
        return {}
    asked = {i for pair in pairs for i in pair}
    outputs = [output for group in groups for output in group.outputs if output.index in asked]
    places = {output.index: place for place, output in enumerate(outputs)}
    reply = yield Compare(
        texts=tuple(output.text for output in outputs),
        pairs=tuple((places[one], places[other]) for one, other in pairs),
        model=model,
    )
    if not isinstance(reply, Alike) or len(reply.scores) != len(pairs):
        return {}
    return dict(zip(pairs, reply.scores, strict=True))


def _edits(bounds: Bounds, found: Merge, calls: Mapping[int, ToolCall]) -> dict[int, Edit]:
    texts = {index: _gone(bounds, index, calls) for index in found.earlier}
    return {
        index: replace_content(bounds.transcript, index, text, kind=EditKind.MERGE, counter=bounds.counter)
        for index, text in {**texts, found.index: found.text}.items()
    }


def _gone(bounds: Bounds, index: int, calls: Mapping[int, ToolCall]) -> str:
    if bounds.settings.placeholder != "finding":
        return standin(bounds, index, calls)
    return f"[weir: merged into a later result; archived as {bounds.transcript.messages[index].ref}]"
