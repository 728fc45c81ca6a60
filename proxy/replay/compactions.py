"""The moments of a recorded conversation at which a policy took something out, and what each of them left."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from policies import PlannedMessage, ToolCall
from policies.ledger import Cut
from policies.quality.coverage import Contexts, Coverage, contexts_of, coverage_of, questions_for
from policies.quality.fidelity import Fidelity, Terms, evaluate
from policies.settings import NoteTaking
from proxy.effects.perform import Ask, drive, step
from proxy.replay.recordings import Recording
from proxy.replay.scenarios import Scenario
from proxy.replay.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """One batch: the whole conversation and what went up in its place.

    ``request`` is the number of messages of the request, 0 for a pair out of the archive. ``facts`` are those that
    the conversation still needs then, ``later`` the calls that it goes on to make, ``archived`` the text of the
    originals that were kept, ``asked`` how often the policy asked a model to write.
    """

    request: int
    contexts: Contexts
    facts: tuple[tuple[str, ...], ...] = ()
    later: tuple[ToolCall, ...] = ()
    archived: str = ""
    layers: tuple[str, ...] = ()
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One compaction with both scores; ``fidelity`` without any verdict where no model was asked."""

    compaction: Compaction
    coverage: Coverage
    fidelity: Fidelity = field(default_factory=Fidelity)


async def compactions_of(script: Script, scenario: Scenario) -> AsyncIterator[Compaction]:
    """Every batch of a scenario, in order."""
    archived: set[int] = set()
    for request in script.requests:
        forwarded = await scenario.forward(script, request.length)
        archived |= set(forwarded.removed)
        if not forwarded.new or forwarded.pieces is None:
            continue
        length = request.length
        needed = [f for f in script.recording.facts if not f.needed_at or any(at >= length for at in f.needed_at)]
        yield Compaction(
            request=length,
            contexts=contexts_of(script.transcript(length), forwarded.pieces),
            facts=tuple(fact.needles for fact in needed),
            later=tuple(c for index in range(length, len(script.recording.values)) for c in script.read(index).calls),
            archived="\n".join(script.text(index) for index in sorted(archived)),
            layers=forwarded.layers,
            asked=forwarded.asked,
        )
    await scenario.close()


def archived_pair(recording: Recording, cut: Cut, *, script: Script) -> Compaction:
    """A summary out of the archive beside the originals that it stands for, which are all of ``recording``."""
    length = len(recording.values)
    return Compaction(
        request=0,
        contexts=contexts_of(script.transcript(length), (PlannedMessage(None, cut.tokens, cut.text),)),
        archived="\n".join(script.text(index) for index in range(length)),
        layers=(cut.layer,),
    )


async def judge_compaction(
    compaction: Compaction, *, count: int, tools: NoteTaking, ask: Ask | None = None, terms: Terms | None = None
) -> Evaluated:
    """The scores of one compaction; ``count`` questions are asked where there is somebody to ask."""
    contexts, later = compaction.contexts, compaction.later
    coverage = coverage_of(contexts, facts=compaction.facts, later=later, archived=compaction.archived, tools=tools)
    if ask is None or terms is None:
        return Evaluated(compaction, coverage)
    recorded = tuple(values[0] for values in compaction.facts if len(values) == 1)
    questions = questions_for(contexts.sources, count=count, later=later, recorded=recorded, tools=tools)
    flow = evaluate(contexts.original, contexts.compacted, questions=questions, terms=terms)
    return Evaluated(compaction, coverage, await drive(flow, step(flow), ask))
