"""Results of one tool that say nearly the same become one: the latest stays and says what changed, the others go.

Whether two of them are alike is asked for (shingles, or the vectors of a model that the policy names). Equal ones
need no asking, and where the answer does not come nothing else is merged. Where that leaves the layer above its target
and the policy has a model that writes, it writes what the others said and the latest says.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from policies.bounds import Bounds
from policies.condensed import Condensed
from policies.condensing import LARGEST_SHARE, MOST_ASKED, TOO_LITTLE, largest_input, may_ask, reworded
from policies.draft import Draft
from policies.edits import replace_content
from policies.effects import Alike, Compare, Flow
from policies.flows import together
from policies.ledger import Edit, EditKind
from policies.messages import ToolCall
from policies.scoring.duplication import THRESHOLD, Group, Merge, Output, candidate_groups, merge
from policies.standins import standin
from policies.summary import Line, Written, condense

LEAST_WORDS = 48
"""Tokens that a model has for a group of results at the least."""


def semantic_merge(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft with results that are more alike than ``threshold`` (a param) merged, where that saves tokens."""
    calls = bounds.calls()
    groups = candidate_groups(_outputs(draft, bounds, calls))
    if not groups:
        return draft
    stated = bounds.layer.params.get("threshold", THRESHOLD)
    threshold = float(stated) if isinstance(stated, int | float) else THRESHOLD
    similarities = yield from _compared(groups, bounds.settings.embeddings)
    merges = merge(groups, similarities, threshold=threshold)
    edits = _worth_it(draft, [_edits(bounds, found, calls) for found in merges])
    merged = draft.with_edits(edits)
    if merged.tokens <= bounds.target or not may_ask(bounds):
        return merged
    shorter, records = yield from _in_words(bounds, merges, edits, calls)
    return draft.with_edits({**edits, **shorter}).with_condensed(records)


def _worth_it(draft: Draft, groups: Sequence[Mapping[int, Edit]]) -> dict[int, Edit]:
    """The edits of those groups that save tokens."""
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    worth = [g for g in groups if sum(e.tokens for e in g.values()) < sum(tokens[i] for i in g)]
    return {index: edit for group in worth for index, edit in group.items()}


def _in_words(
    bounds: Bounds, merges: Sequence[Merge], edits: Mapping[int, Edit], calls: Mapping[int, ToolCall]
) -> Flow[tuple[dict[int, Edit], list[Condensed]]]:
    """For groups that are merged the edit of the one that stays, in a model's words where these are shorter."""
    read = bounds.transcript.read
    asked = [m for m in merges if m.index in edits and len({read(i).text for i in (*m.earlier, m.index)}) > 1]
    asked = sorted(asked, key=lambda m: (-edits[m.index].tokens, m.index))[:MOST_ASKED]
    found = yield from together([_asked(bounds, m, edits[m.index].tokens, calls) for m in asked])
    shorter: dict[int, Edit] = {}
    records: list[Condensed] = []
    for group, written in zip(asked, found, strict=True):
        edit, standing = _merged(bounds, group, written.text), edits[group.index]
        taken = bool(written.text) and edit.tokens < LARGEST_SHARE * standing.tokens
        if taken:
            shorter[group.index] = edit
        failure = written.failure or ("" if taken else TOO_LITTLE)
        records.append(_record(bounds, group, edit if taken else standing, written, failure))
    return shorter, records


def _asked(bounds: Bounds, group: Merge, tokens: int, calls: Mapping[int, ToolCall]) -> Flow[Written]:
    """What a model says of a group of results, in at most half of what the latest of them takes."""
    members, tool = (*group.earlier, group.index), calls[group.index].name
    texts = [bounds.transcript.read(i).text for i in members]
    lines = [Line(f"result of {tool}, {n} of {len(texts)}", text) for n, text in enumerate(texts, 1)]
    return condense(
        lines,
        prompt="tool_result",
        max_tokens=max(LEAST_WORDS, tokens // 2),
        max_input=largest_input(bounds),
        counter=bounds.counter,
        key=_key(bounds, group),
        most_chunks=bounds.settings.summaries.most_chunks,
    )


def _key(bounds: Bounds, group: Merge) -> str:
    messages = bounds.transcript.messages
    return blake2b(b"".join(messages[i].digest for i in (*group.earlier, group.index)), digest_size=16).hexdigest()


def _merged(bounds: Bounds, group: Merge, text: str) -> Edit:
    """The edit by which the latest of a group says in a model's words what all of it said."""
    ref, count = bounds.transcript.messages[group.index].ref, len(group.earlier)
    others = "1 earlier result" if count == 1 else f"{count} earlier results"
    tail = f"[weir: summary of this and {others}, archived as {ref}]"
    return reworded(bounds, group.index, f"{text.strip()}\n{tail}", kind=EditKind.MERGE)


def _record(bounds: Bounds, group: Merge, edit: Edit, written: Written, failure: str) -> Condensed:
    messages = bounds.transcript.messages
    return Condensed(
        strategy=str(EditKind.MERGE),
        original_tokens=sum(messages[i].tokens for i in (*group.earlier, group.index)),
        compressed_tokens=edit.tokens,
        calls=written.calls,
        purpose=written.purpose,
        ref=messages[group.index].ref,
        key=_key(bounds, group),
        failure=failure,
    )


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
