"""Measuring, after some answers, what a summary left of a conversation: the same questions asked of both, and judged.

Off unless a policy samples. What would have to wait is left out, because a sample is enough. It takes tokens of the
summariser's budget and nothing of any request's time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from policies.decision import Decision
from policies.quality.coverage import Contexts, Coverage, Dimension, contexts_of, coverage_of, questions_for
from policies.quality.fidelity import ANSWER, JUDGE, AnswerVerdict, Fidelity, Terms, evaluate
from proxy.effects.perform import drive, step
from proxy.planning.preparation import Background
from proxy.planning.values import Paid, Plan, PlanRequest, Recognized
from proxy.store import Store
from proxy.store.records import StoreError
from proxy.store.write_behind import WriteBehindQueue
from proxy.telemetry import Trace, names

log = logging.getLogger("weir.evaluation")

AT_ONCE = 1
MAX_WAITING = 8
PROMPTS_USED = {"prompts": {prompt.purpose: prompt.digest for prompt in (ANSWER, JUDGE)}}
SUMMARISING = frozenset({"compact", "rollover"})
_SCALE = 1 << 64
_ATTRIBUTES = {
    Dimension.FACTS: names.FIDELITY_FACTS,
    Dimension.STATE: names.FIDELITY_STATE,
    Dimension.DECISIONS: names.FIDELITY_DECISIONS,
}


def is_sampled(request: str, share: float) -> bool:
    """The same answer for the same id, everywhere."""
    digest = blake2b(request.encode(errors="replace"), digest_size=8, person=b"weir-sample").digest()
    return int.from_bytes(digest) < share * _SCALE


@dataclass(frozen=True, slots=True)
class _Work:
    asked: PlanRequest
    ask: Paid
    recognized: Recognized
    decision: Decision
    trace: Trace


class OnlineEvaluation:
    """``scores`` are the newest by policy and dimension; ``rate`` is told tenant, conversation and fidelity."""

    def __init__(
        self,
        store: Store,
        settler: WriteBehindQueue,
        *,
        rate: Callable[[str, str, float], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._store = store
        self._settler = settler
        self._background = Background("weir-evaluate", most=MAX_WAITING, at_once=AT_ONCE)
        self.scores: dict[tuple[str, ...], float] = {}

    def after(self, asked: PlanRequest, plan: Plan, trace: Trace) -> None:
        decision, recognized, settings = plan.decision, plan.recognized, asked.settings
        if decision is None or decision.cut is None or not decision.is_new or settings.observes or recognized is None:
            return
        if decision.cut.layer not in SUMMARISING or decision.pieces is None or asked.ask_about is None:
            return
        if not is_sampled(asked.id, settings.evaluate.sample):
            return
        if settings.evaluate.model is None and settings.summarizer is None:
            return  # nobody who could be asked: Weir spends no money unasked
        if recognized.thread.branch.branch in self._background or not self._background.has_room:
            return
        work = _Work(asked, asked.ask_about, recognized, decision, trace)
        self._background.start(recognized.thread.branch.branch, partial(self._do, work))

    async def close(self) -> None:
        await self._background.close()

    async def settled(self) -> None:
        await self._background.settled()

    async def _do(self, work: _Work) -> None:
        trace = work.ask.trace = work.trace.follow(names.EVALUATE_SPAN)
        try:
            await self._measure(work, trace)
        except StoreError as error:
            log.warning("what was measured of a summary could not be stored: %s", error)
        except Exception:  # the answer is long out: nothing here may end the process's other work
            log.exception("measuring a summary failed")
        finally:
            trace.end(None)

    async def _measure(self, work: _Work, trace: Trace) -> None:
        settings, pieces, branch = work.asked.settings, work.decision.pieces or (), work.recognized.thread.branch
        contexts = await asyncio.to_thread(contexts_of, work.recognized.transcript, pieces)
        coverage = await asyncio.to_thread(coverage_of, contexts, tools=settings.notes)
        fidelity = await self._asked(work, contexts)
        trace.evaluated(_attributes(fidelity, coverage, contexts.ratio))
        for dimension, value in _scores(fidelity).items():
            if value is not None:
                self.scores[(settings.name, dimension)] = value
        if (score := fidelity.score()) is not None:
            self._rate(branch.tenant, branch.conversation, score)
        await self._settler.flush()  # the row of the exchange has to be there
        facts = facts_of(fidelity, coverage, contexts.ratio, spent=work.ask.spent.asked)
        await self._store.evaluated(branch.tenant, work.asked.id, facts | PROMPTS_USED, self._clock())

    async def _asked(self, work: _Work, contexts: Contexts) -> Fidelity:
        settings, limit = work.asked.settings, work.recognized.limits.budget.hard_limit
        questions = await asyncio.to_thread(
            questions_for, contexts.sources, count=settings.evaluate.questions, tools=settings.notes
        )
        terms = Terms(
            counter=work.asked.counter,
            max_input=work.ask.reads(ANSWER.purpose) or limit,
            judge_input=work.ask.reads(JUDGE.purpose) or limit,
            most_chunks=settings.summaries.most_chunks,
            by_schema=settings.summaries.by_schema,
        )
        flow = evaluate(contexts.original, contexts.compacted, questions=questions, terms=terms)
        return await drive(flow, await asyncio.to_thread(step, flow), work.ask)


def facts_of(
    fidelity: Fidelity, coverage: Coverage, ratio: float | None, *, spent: int | None = None
) -> dict[str, object]:
    return {
        **_scores(fidelity),
        "consistent": fidelity.count(AnswerVerdict.YES),
        "inconsistent": fidelity.count(AnswerVerdict.NO),
        "unknown": fidelity.count(AnswerVerdict.UNKNOWN),
        "unknown_because": fidelity.unknown,
        "failure": fidelity.failure or None,
        "coverage": coverage.score,
        "recoverable": coverage.whole.recoverable,
        "compression_ratio": None if ratio is None else round(ratio, 3),
        "calls": fidelity.calls,
        **({} if spent is None else {"tokens_asked": spent}),
    }


def _scores(fidelity: Fidelity) -> dict[str, float | None]:
    by_dimension = {dimension.value: fidelity.score(dimension) for dimension in Dimension}
    return {"score": fidelity.score(), **by_dimension}


def _attributes(fidelity: Fidelity, coverage: Coverage, ratio: float | None) -> Mapping[str, float | None]:
    return {
        names.FIDELITY_SCORE: fidelity.score(),
        **{_ATTRIBUTES[dimension]: fidelity.score(dimension) for dimension in Dimension},
        names.FIDELITY_JUDGED: fidelity.count(AnswerVerdict.YES) + fidelity.count(AnswerVerdict.NO),
        names.FIDELITY_UNKNOWN: fidelity.count(AnswerVerdict.UNKNOWN),
        names.COVERAGE_SCORE: coverage.score,
        names.FIDELITY_RATIO: ratio,
    }
