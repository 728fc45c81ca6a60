"""``semantic_merge``: results of one tool that say nearly the same become one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from policies.draft import Bounds, Draft, Strategy, number, placeholder_for, touchable
from policies.effects import Alike, Compare, Flow
from policies.ledger import Edit, EditKind
from policies.strategies.redundancy import Candidates, Merge, Output, candidates, merge
from policies.strategies.rewrite import MAX_ASKED, RewriteTask, may_ask, placed, texts_of
from policies.summary.material import MaterialLine

MIN_WORDS = 48
"""Minimum tokens that a model has for a group of results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticMerge(Strategy):
    """Results of one tool that are more alike than ``threshold`` become one: the latest, which says
    what changed.

    Equal ones need no comparison; without an answer nothing else is merged.
    """

    name = "semantic_merge"
    threshold: float = number(0.85, most=1)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        calls = bounds.transcript.calls
        answers = (
            (i, piece)
            for i, piece, message in touchable(draft, bounds)
            if i in calls and not message.media
        )
        read = draft.transcript.read
        outputs = [
            Output(i, calls[i].name, read(i).text) for i, piece in answers if piece.text is None
        ]
        found = candidates(outputs)
        similarities = yield from _compared(found, bounds.settings.embeddings)
        merges = merge(found, similarities, threshold=self.threshold)
        tokens = draft.tokens_by_index()
        edits = dict[int, Edit]()
        for group in (_merged(bounds, each) for each in merges):
            if sum(edit.tokens for edit in group.values()) < sum(tokens[index] for index in group):
                edits |= group
        merged = draft.with_edits(edits)
        if merged.tokens <= bounds.target or not may_ask(bounds):
            return merged
        jobs = _in_words(bounds, merges, edits)
        texts = yield from texts_of(bounds, jobs, asking=True)
        return placed(merged, bounds, jobs, texts)[0]


def _compared(found: Candidates, model: str | None) -> Flow[dict[tuple[int, int], float]]:
    if not found.pairs:
        return {}
    asked = sorted({i for pair in found.pairs for i in pair})
    places = {index: place for place, index in enumerate(asked)}
    reply = yield Compare(
        texts=tuple(found.texts[i] for i in asked),
        pairs=tuple((places[one], places[other]) for one, other in found.pairs),
        model=model,
    )
    if not isinstance(reply, Alike) or len(reply.scores) != len(found.pairs):
        return {}
    return dict(zip(found.pairs, reply.scores, strict=True))


def _merged(bounds: Bounds, found: Merge) -> dict[int, Edit]:

    def gone(index: int) -> str:
        if bounds.settings.placeholder != "finding":
            return placeholder_for(bounds, index)
        return (
            "[weir: merged into a later result; archived as"
            f" {bounds.transcript.messages[index].ref}]"
        )

    texts = {**{index: gone(index) for index in found.earlier}, found.index: found.text}
    return {index: bounds.edited(index, text, EditKind.MERGE) for index, text in texts.items()}


def _in_words(
    bounds: Bounds, merges: Sequence[Merge], edits: Mapping[int, Edit]
) -> list[RewriteTask]:
    """What a model may say in fewer words of merged results that differ, the largest first."""
    messages = bounds.transcript.messages
    found = list[RewriteTask]()
    for merged in merges:
        members = (*merged.earlier, merged.index)
        tool = bounds.transcript.calls[merged.index].name
        texts = [bounds.transcript.read(i).text for i in members]
        if merged.index not in edits or len({*texts}) == 1:
            continue
        standing = edits[merged.index].tokens
        others = "1 earlier result" if len(texts) == 2 else f"{len(texts) - 1} earlier results"
        found.append(
            RewriteTask(
                index=merged.index,
                kind=EditKind.MERGE,
                allowed=max(MIN_WORDS, standing // 2),
                tail=(
                    f"[weir: summary of this and {others}, archived as"
                    f" {messages[merged.index].ref}]"
                ),
                key=blake2b(
                    b"".join(messages[i].digest for i in members), digest_size=16
                ).hexdigest(),
                prompt="tool_result",
                lines=tuple(
                    MaterialLine(f"result of {tool}, {n} of {len(texts)}", text)
                    for n, text in enumerate(texts, 1)
                ),
                original=sum(messages[i].tokens for i in members),
                standing=standing,
            )
        )
    found.sort(key=lambda job: (-edits[job.index].tokens, job.index))
    return found[:MAX_ASKED]
