"""``weir evaluate``: what compactions left of conversations, by code alone and as a model judges it."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from policies.effects import Failed, Summarize, Summary
from policies.quality.coverage import MAX_QUESTIONS, MIN_QUESTIONS, Coverage, Dimension, Share
from policies.quality.fidelity import ANSWER, JUDGE, PROMPTS, PROPOSE, AnswerVerdict, Fidelity, Terms
from policies.settings import ContextSettings
from proxy.access.destination import CHAT_PATH, Caller, by_weir, upstream_for
from proxy.cli.output import print_line, print_table, progress
from proxy.cli.replay import conditions_for, policy_named, recorded, summarized
from proxy.cli.shared import FILE, POSITIVE, config_option, json_option, loaded, opened, print_json, store_option
from proxy.config.values import Config, Flags
from proxy.effects.perform import EffectHandler, Spent
from proxy.effects.summarizer import Summarizer, SummarizerTerms
from proxy.models.facts import ModelFacts
from proxy.planning.preparation import facts_of
from proxy.replay.play import Compaction, Evaluated, archived_pair, compactions_of, judge_compaction
from proxy.replay.scenarios import Conditions, Managed, store_in_memory
from proxy.replay.script import Script
from proxy.upstream.client import Client, Upstreams
from proxy.upstream.providers import providers_for

SECONDS = 300.0
"""Longest wait for one answer: nobody waits behind it, and a model on one's own machine takes its time."""
AT_ONCE = 4
TENANT = "0" * 32
UNLIMITED = 1 << 60


@dataclass(slots=True)
class Models(EffectHandler):
    """Has models asked: by purpose another than the ``default``, all together for so many ``tokens`` at most."""

    config: Config
    _: KW_ONLY
    default: str
    by_purpose: Mapping[str, str]
    tokens: int | None
    at_once: int = AT_ONCE
    seconds: float = SECONDS
    spent: Spent = field(default_factory=Spent)
    failures: Counter[str] = field(default_factory=Counter)
    _turns: asyncio.Semaphore = field(init=False)
    _upstreams: Upstreams = field(init=False)
    _summarizer: Summarizer = field(init=False, default_factory=Summarizer)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(self.at_once)
        self._upstreams = Upstreams(Client(instance="evaluate"), providers_for(self.config.upstreams.values()))

    async def aclose(self) -> None:
        await self._summarizer.close()
        await self._upstreams.close()

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        if effect.standing:
            return Failed("not_in_place")
        model = self.by_purpose.get(effect.purpose, self.default)
        upstream = upstream_for(self.config, model)
        most = UNLIMITED if self.tokens is None else self.tokens
        terms = SummarizerTerms(
            tenant=TENANT, upstream=upstream.name, model=model, seconds=self.seconds, tokens_per_hour=most
        )
        caller = Caller(tenant=TENANT, credential=os.environ.get("OPENAI_API_KEY", "").encode())
        destination = by_weir(upstream, caller, path=CHAT_PATH, model=model)
        send = partial(self._upstreams.post, destination)
        async with self._turns:  # a server with one slot has the others wait, and their time runs
            told = await self._summarizer.ask(effect, terms=terms, send=send)
        if told.usage is not None:
            self.spent += Spent(calls=1, asked=told.usage.prompt or 0, answered=told.usage.completion or 0)
        elif told.source == "asked":
            self.spent += Spent(calls=1)
        if told.result != "ok":
            self.failures[told.result] += 1
        return told.reply


INPUT_SHARE = 0.7
"""Share of a model's window that a question with its material may take: its tokenizer may be another one."""
USUAL_WINDOW = 8_192
TOO_AGGRESSIVE = 0.75
"""Fidelity under which a compaction takes too much (requirement A0.122)."""
TITLES = (
    "conversation", "request", "before", "after", "ratio", "coverage", "recoverable",
    "fidelity", "key facts", "state", "decisions", "yes/no/unknown",
)  # fmt: skip
MAX_MISSING = 8


@dataclass(slots=True, kw_only=True)
class _EvaluationRun:
    config: Config
    settings: ContextSettings
    conditions: Conditions
    questions: int
    model: str | None
    judge: str | None
    terms: Terms | None
    models: Models | None
    done: list[tuple[str, Evaluated]] = field(default_factory=list)

    @property
    def fidelity(self) -> Fidelity:
        return sum((each.fidelity for _, each in self.done), Fidelity())

    @property
    def coverage(self) -> Coverage:
        return sum((each.coverage for _, each in self.done), Coverage())

    @property
    def sizes(self) -> tuple[int, int]:
        contexts = [each.compaction.contexts for _, each in self.done]
        return sum(each.tokens_before for each in contexts), sum(each.tokens_after for each in contexts)

    @property
    def ratio(self) -> float | None:
        before, after = self.sizes
        return before / after if before and after else None

    @property
    def failures(self) -> dict[str, int]:
        return {} if self.models is None else self.models.failures


@click.command()
@click.argument("file", type=FILE, required=False)
@click.option("--conversation", metavar="ID", help="Evaluate a stored conversation's summaries instead of a file.")
@click.option("--policy", default="balanced", help="A policy's name, or FILE.yaml:NAME.")
@click.option("--window", type=click.IntRange(min=256), help="The window, tokens; defaults to the policy's.")
@click.option("--max-tokens", type=POSITIVE, help="The max_tokens of each request; defaults to the policy's reserve.")
@click.option("--model", help="The model that answers questions; without it only coverage is scored.")
@click.option("--judge", help="The model that compares the answers; defaults to --model.")
@click.option("--summarizer", help="The model that writes summaries, `same` for --model; defaults to the policy's.")
@click.option(
    "--upstream", metavar="URL", help="The models' server; defaults to the configuration's. OPENAI_API_KEY is sent."
)
@click.option("--model-window", type=click.IntRange(min=1024), help="The models' context window, tokens.")
@click.option(
    "--questions", type=click.IntRange(MIN_QUESTIONS, MAX_QUESTIONS), default=10, help="Questions per compaction."
)
@click.option("--propose", type=click.IntRange(0, 10), help="Additional questions, written by the model.")
@click.option("--budget", type=POSITIVE, help="The most tokens to spend on the models.")
@click.option("--at-once", type=click.IntRange(1, 8), default=AT_ONCE, help="Concurrent questions.")
@click.option("--seconds", type=click.FloatRange(min=1), default=SECONDS, help="Timeout for an answer.")
@click.option("--limit", type=POSITIVE, help="Only the first so many conversations.")
@click.option("--gate", type=click.FloatRange(0, 1), help="Exit with 1 if fidelity is lower, or nothing was judged.")
@click.option("--gate-coverage", type=click.FloatRange(0, 1), help="Exit with 1 if coverage is lower. Needs no model.")
@click.option("--answers", is_flag=True, help="Print every question with both answers, to check the judge.")
@config_option
@store_option
@json_option
def evaluate(
    *,
    file: Path | None,
    conversation: str | None,
    policy: str,
    window: int | None,
    max_tokens: int | None,
    questions: int,
    limit: int | None,
    gate: float | None,
    gate_coverage: float | None,
    answers: bool,
    path: Path | None,
    store: str | None,
    as_json: bool,
    **asking: Any,
) -> None:
    """Score what a policy's compactions keep of recorded conversations: coverage by code, fidelity by a model.

    FILE is as for weir replay. At every batch the whole conversation is compared with what was sent instead: which
    facts, identifiers and rules are still there, and with --model, which of 4 to 20 questions get the same answer.
    Fidelity is the share of consistent answers among those judged, and null if none was judged.

    \b
    Example:
      weir evaluate runs.jsonl --policy balanced --window 8192 --gate-coverage 0.85
      weir evaluate runs.jsonl --model gpt-5-mini --judge gpt-5 --gate 0.85
      weir evaluate --conversation support-4711 --model gpt-5-mini --answers
    """
    if (file is None) == (conversation is None):
        raise click.UsageError("name a file or a --conversation, one of them")
    if gate is not None and not asking["model"]:
        raise click.UsageError("--gate is about judged answers and needs --model; see --gate-coverage")
    config = loaded(path, Flags(upstream=asking["upstream"], store=store, summarizer=asking["summarizer"]))
    settings = policy_named(policy, config)
    models = _models_of(config, settings, asking)
    conditions = conditions_for(config, model=asking["model"], window=window, max_tokens=max_tokens)
    run = _EvaluationRun(
        config=config,
        settings=settings,
        conditions=replace(conditions, model="", facts=ModelFacts()),
        questions=questions,
        model=asking["model"],
        judge=asking["judge"] or asking["model"],
        terms=_terms_of(settings, conditions, asking) if asking["model"] else None,
        models=models,
    )
    source = _recorded(run, file, limit) if file is not None else _archived(run, conversation or "")
    asyncio.run(_evaluate(run, source))
    failures = list(_below(run, gate, gate_coverage))
    _print(run, failures, answers=answers, as_json=as_json)
    for failure in failures:
        click.echo(f"weir: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)


def _print(run: _EvaluationRun, failures: Sequence[str], *, answers: bool, as_json: bool) -> None:
    if as_json:
        print_json(_report(run, answers=answers, failures=failures))
        return
    print_table(TITLES, _rows(run), numbers=1)
    for line in _lines(run, answers=answers):
        print_line(line)


def _terms_of(settings: ContextSettings, conditions: Conditions, asking: Mapping[str, Any]) -> Terms:
    window = asking["model_window"] or conditions.facts.window or settings.window or USUAL_WINDOW
    reads = int(INPUT_SHARE * window)
    return Terms(counter=conditions.counter, max_input=reads, judge_input=reads, propose=asking["propose"] or 0)


def _models_of(config: Config, settings: ContextSettings, asking: Mapping[str, Any]) -> Models | None:
    """None where no model is to answer questions or to write summaries."""
    model, writer = asking["model"] or "", None if settings.summarizer == "same" else settings.summarizer
    if not model and (asking["summarizer"] is None or writer is None):
        return None
    if not config.upstreams:
        raise click.UsageError("--model needs an --upstream, a configuration with one, or OPENAI_API_KEY")
    return Models(
        config,
        default=writer or model,
        by_purpose={ANSWER.purpose: model, PROPOSE.purpose: model, JUDGE.purpose: asking["judge"] or model},
        tokens=asking["budget"],
        at_once=asking["at_once"],
        seconds=asking["seconds"],
    )


async def _evaluate(run: _EvaluationRun, source: AsyncIterator[tuple[str, Compaction]]) -> None:
    async with nullcontext() if run.models is None else aclosing(run.models):
        async for name, compaction in source:
            done = await judge_compaction(
                compaction,
                count=run.questions,
                tools=run.settings.notes,
                ask=run.models if run.terms is not None else None,
                terms=run.terms,
            )
            run.done.append((name, done))


async def _recorded(run: _EvaluationRun, file: Path, limit: int | None) -> AsyncIterator[tuple[str, Compaction]]:
    ask = run.models if run.settings.summarizer is not None else None
    async with store_in_memory() as store:
        conditions = run.conditions
        with progress("conversations") as progressed:

            def told(read: int, size: int, text: str) -> None:
                calls = "" if run.models is None else f"{run.models.spent.calls} calls, "
                progressed(read, size, f"{calls}{text}")

            for place in recorded(file, limit, told):
                script = Script(place.recording, counter=conditions.counter, model=conditions.model)
                async for compaction in compactions_of(script, Managed(run.settings, conditions, store, ask=ask)):
                    yield place.recording.id, compaction


async def _archived(run: _EvaluationRun, conversation: str) -> AsyncIterator[tuple[str, Compaction]]:
    async with opened(run.config.store.url, read_only=True) as store:
        for cut, recording in await summarized(store, conversation):
            if cut.text:
                script = Script(recording, counter=run.conditions.counter, model="")
                yield f"{recording.id} v{cut.version}", archived_pair(recording, cut, script=script)


def _below(run: _EvaluationRun, gate: float | None, gate_coverage: float | None) -> Iterator[str]:
    scores = (("fidelity", run.fidelity.score(), gate), ("coverage", run.coverage.score, gate_coverage))
    for name, score, least in scores:
        if least is not None and score is None:
            yield f"{name} was not measured, and the gate is {least:g}"
        elif least is not None and score is not None and score < least:
            yield f"{name} {score:.3f} is below the gate of {least:g}"


def _rows(run: _EvaluationRun) -> Iterator[tuple[str, ...]]:
    for name, each in run.done:
        contexts, request = each.compaction.contexts, each.compaction.request
        sizes = (f"{contexts.tokens_before:,}", f"{contexts.tokens_after:,}", _times(contexts.ratio))
        yield (name, str(request) if request else "archive", *sizes, *_scores(each.coverage, each.fidelity))
    before, after = run.sizes
    sizes = (f"{before:,}", f"{after:,}", _times(run.ratio))
    yield ("all", str(len(run.done)), *sizes, *_scores(run.coverage, run.fidelity))


def _scores(coverage: Coverage, fidelity: Fidelity) -> tuple[str, ...]:
    counts = "/".join(
        str(fidelity.count(verdict)) for verdict in (AnswerVerdict.YES, AnswerVerdict.NO, AnswerVerdict.UNKNOWN)
    )
    return (
        _percent(coverage.score),
        _percent(coverage.whole.recoverable),
        _percent(fidelity.score()),
        *(_percent(fidelity.score(dimension)) for dimension in Dimension),
        counts if fidelity.judged else "null",
    )


def _percent(value: float | None) -> str:
    return "null" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "null" if value is None else f"{value:.2f}x"


def _lines(run: _EvaluationRun, *, answers: bool) -> Iterator[str]:
    coverage, fidelity, score = run.coverage, run.fidelity, run.fidelity.score()
    if not run.done:
        yield "Nothing was compacted, so nothing was measured."
        return
    kept = (f"{share.kept} of {share.wanted} {name}" for name, share in _kinds(coverage).items())
    yield f"Kept: {', '.join(kept)}."
    if coverage.missing:
        yield f"Not kept, but archived or gone: {'; '.join(coverage.missing[:MAX_MISSING])}"
    if score is not None and score < TOO_AGGRESSIVE:
        yield f"Fidelity under {TOO_AGGRESSIVE} says that too much is taken: raise low_water, tail or extract."
    if run.model and run.models is not None:
        spent = run.models.spent
        asked = f"{spent.calls} calls, {spent.asked:,} tokens asked, {spent.answered:,} answered"
        yield f"{run.model} answered and {run.judge} judged: {asked}."
    if reasons := {**fidelity.unknown, **{f"call: {k}": v for k, v in run.failures.items()}}:
        yield "Not decided: " + ", ".join(f"{count} {why}" for why, count in reasons.items()) + "."
    for name, each in run.done if answers else ():
        for judged in each.fidelity.judged:
            yield f"\n{name}, request {each.compaction.request}: {judged.question.text}"
            yield f"  whole:     {' '.join(judged.original.split())}"
            yield f"  compacted: {' '.join(judged.compacted.split())}"
            yield f"  verdict:   {judged.verdict}{f' ({judged.why})' if judged.why else ''}"


def _report(run: _EvaluationRun, *, answers: bool, failures: Sequence[str]) -> dict[str, object]:
    return {
        "policy": run.settings.name,
        "model": run.model or None,
        "judge": run.judge or None,
        "prompts": {prompt.purpose: prompt.digest for prompt in PROMPTS.values()},
        "conversations": len({name for name, _ in run.done}),
        "compactions": [_entry(name, each, answers=answers) for name, each in run.done],
        "total": facts_of(run.fidelity, run.coverage, run.ratio) | _shares(run.coverage),
        "missing": list(run.coverage.missing),
        "spent": asdict(Spent() if run.models is None else run.models.spent),
        "failures": run.failures,
        "passed": not failures,
        "below": list(failures),
    }


def _entry(name: str, each: Evaluated, *, answers: bool) -> dict[str, object]:
    contexts = each.compaction.contexts
    entry: dict[str, object] = {
        "conversation": name,
        "request": each.compaction.request or None,
        "layers": list(each.compaction.layers),
        "tokens_before": contexts.tokens_before,
        "tokens_after": contexts.tokens_after,
        **facts_of(each.fidelity, each.coverage, contexts.ratio),
        **_shares(each.coverage),
    }
    if answers:
        entry["answers"] = [
            {
                "question": j.question.text,
                "dimension": j.question.dimension.value,
                "origin": j.question.origin,
                "original": j.original,
                "compacted": j.compacted,
                "verdict": j.verdict.value,
                "why": j.why or None,
            }
            for j in each.fidelity.judged
        ]
    return entry


def _shares(coverage: Coverage) -> dict[str, object]:
    return {
        name: {"wanted": share.wanted, "kept": share.kept, "share": share.value, "recoverable": share.recoverable}
        for name, share in _kinds(coverage).items()
    }


def _kinds(coverage: Coverage) -> dict[str, Share]:
    return {"facts": coverage.facts, "identifiers": coverage.identifiers, "rules": coverage.rules}
