"""Evaluating compactions of recorded conversations: the deterministic score, and with a model the judged one."""

from dataclasses import dataclass, field

from policies.fidelity import Coverage, Fidelity, Terms, coverage_of, evaluate, questions_for
from policies.settings import NoteTaking
from proxy.effects.perform import Ask, drive, step
from proxy.rehearsal.compactions import Compaction


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One compaction with both scores; ``fidelity`` without any verdict where no model was asked."""

    compaction: Compaction
    coverage: Coverage
    fidelity: Fidelity = field(default_factory=Fidelity)


async def judge_compaction(
    compaction: Compaction, *, count: int, tools: NoteTaking, ask: Ask | None = None, terms: Terms | None = None
) -> Evaluated:
    """The scores of one compaction; ``count`` questions are asked where there is somebody to ask."""
    contexts = compaction.contexts
    coverage = coverage_of(
        contexts, facts=compaction.facts, later=compaction.later, archived=compaction.archived, tools=tools
    )
    if ask is None or terms is None:
        return Evaluated(compaction, coverage)
    questions = questions_for(
        contexts.sources, count=count, later=compaction.later, recorded=compaction.recorded, tools=tools
    )
    flow = evaluate(contexts.original, contexts.compacted, questions=questions, terms=terms)
    return Evaluated(compaction, coverage, await drive(flow, step(flow), ask))
