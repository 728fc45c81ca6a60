"""``weir evaluate``: what a policy's compactions leave of recorded conversations, by code and as a model judges it."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from policies.effects import Failed, Summarize, Summary, step
from policies.quality.coverage import Contexts, Coverage, Dimension, Question, contexts_of, coverage_of, questions_for
from policies.quality.fidelity import ANSWER, JUDGE, PROMPTS, AnswerVerdict, Fidelity
from policies.quality.fidelity import evaluate as answers_judged
from policies.settings import ContextSettings
from proxy.access.destination import CHAT_PATH, Caller, by_weir, upstream_for
from proxy.cli.output import print_line, print_table, progress
from proxy.cli.replay import conditions_for, policy_named, recorded
from proxy.cli.shared import FILE, POSITIVE, config_option, json_option, loaded, print_json
from proxy.config.file import ConfigError, read_document
from proxy.config.values import Config, Flags
from proxy.effects.perform import EffectHandler, Spent, drive
from proxy.effects.summarizer import Summarizer, SummarizerTerms
from proxy.models.facts import ModelFacts
from proxy.replay.scenarios import Conditions, Managed, store_in_memory
from proxy.replay.script import Recording, Script
from proxy.upstream.client import Client, Upstreams
from proxy.upstream.providers import providers_for

SECONDS = 300.0
"""Longest wait for one answer: nobody waits for it, and a model on one's own machine takes its time."""
AT_ONCE = 4
TENANT = "0" * 32
UNLIMITED = 1 << 60
INPUT_SHARE = 0.7
"""Share of a model's window that a question with its material may take: its tokenizer may be another one."""
USUAL_WINDOW = 8_192
TOO_AGGRESSIVE = 0.75
"""Fidelity under which a compaction takes too much (requirement A0.122)."""
MAX_MISSING = 8
ANY_TASK = "default"
TITLES = (
    "conversation", "request", "before", "after", "ratio", "coverage", "recoverable",
    "fidelity", "key facts", "state", "decisions", "yes/no/unknown",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Models(EffectHandler):
    """Has models asked: by purpose another than the ``default``, all together for so many ``tokens`` at most."""

    config: Config
    default: str
    by_purpose: Mapping[str, str] = field(default_factory=dict)
    tokens: int = UNLIMITED
    spent: Spent = field(default_factory=Spent)
    failures: Counter[str] = field(default_factory=Counter)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _upstreams: Upstreams = field(init=False)
    _summarizer: Summarizer = field(init=False, default_factory=Summarizer)

    def __post_init__(self) -> None:
        self._upstreams = Upstreams(Client(instance="evaluate"), providers_for(self.config.upstreams.values()))

    async def aclose(self) -> None:
        await self._summarizer.close()
        await self._upstreams.close()

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        if effect.standing:
            return Failed("not_in_place")
        model = self.by_purpose.get(effect.purpose, self.default)
        upstream = upstream_for(self.config, model)
        terms = SummarizerTerms(
            tenant=TENANT, upstream=upstream.name, model=model, seconds=SECONDS, tokens_per_hour=self.tokens
        )
        caller = Caller(tenant=TENANT, credential=os.environ.get("OPENAI_API_KEY", "").encode())
        destination = by_weir(upstream, caller, path=CHAT_PATH, model=model)
        send = partial(self._upstreams.post, destination)
        async with self._turns:  # a server with one slot has the others wait, and their time runs
            done = await self._summarizer.ask(effect, terms=terms, send=send)
        if done.usage is not None:
            self.spent += Spent(calls=1, asked=done.usage.prompt or 0, answered=done.usage.completion or 0)
        elif done.source == "asked":
            self.spent += Spent(calls=1)
        if done.result != "ok":
            self.failures[done.result] += 1
        return done.reply


class _OwnQuestion(msgspec.Struct, forbid_unknown_fields=True):
    ask: str
    dimension: Dimension = Dimension.FACTS
    expected: tuple[str, ...] = ()


_Suite = Annotated[list[str | _OwnQuestion], msgspec.Meta(min_length=1)]


def suites_in(path: Path) -> Mapping[str, tuple[Question, ...]]:
    """The questions of a YAML file by task type; a file that holds none is wrong usage."""
    try:
        read = msgspec.convert(read_document(path, env={}).data, dict[str, _Suite])
    except (ConfigError, msgspec.ValidationError) as fault:
        raise click.UsageError(f"{path}: {fault}") from None
    return {task: tuple(map(_own_question, suite)) for task, suite in read.items()}


def _own_question(given: str | _OwnQuestion) -> Question:
    own = _OwnQuestion(given) if isinstance(given, str) else given
    return Question(own.ask, own.dimension, own.expected)


@dataclass(frozen=True, slots=True)
class Evaluated:
    conversation: str
    request: int
    contexts: Contexts
    coverage: Coverage
    fidelity: Fidelity


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One run: ``models`` are asked where there are any, and judge where ``judges``; ``done`` fills."""

    settings: ContextSettings
    conditions: Conditions
    models: Models | None
    judges: bool
    max_input: int
    suites: Mapping[str, tuple[Question, ...]]
    count: int
    done: list[Evaluated] = field(default_factory=list)

    async def run(self, file: Path, limit: int | None) -> None:
        async with store_in_memory() as store:
            with progress("conversations") as progressed:
                for place in recorded(file, limit, progressed):
                    writes = self.models if self.settings.summarizer is not None else None
                    scenario = Managed(self.settings, self.conditions, store, ask=writes)
                    async for each in self._compactions(place.recording, scenario):
                        self.done.append(each)
        if self.models is not None:
            await self.models.aclose()

    async def _compactions(self, recording: Recording, scenario: Managed) -> AsyncIterator[Evaluated]:
        script = Script(recording, counter=self.conditions.counter, model="")
        archived: set[int] = set()
        for request in script.requests:
            sent = await scenario.forward(script, request.length)
            archived |= set(sent.removed)
            if not sent.new or sent.pieces is None:
                continue
            length = request.length
            facts = [f.needles for f in recording.facts if not f.needed_at or any(at >= length for at in f.needed_at)]
            later = tuple(call for at in range(length, len(recording.values)) for call in script.read(at).calls)
            contexts = contexts_of(script.transcript(length), sent.pieces, later=later)
            text = "\n".join(script.text(index) for index in sorted(archived))
            coverage = coverage_of(contexts, facts=facts, archived=text, tools=self.settings.notes)
            fidelity = await self._judged(recording.task, contexts, facts)
            yield Evaluated(recording.id, length, contexts, coverage, fidelity)
        await scenario.close()

    async def _judged(self, task: str, contexts: Contexts, facts: Sequence[tuple[str, ...]]) -> Fidelity:
        if self.models is None or not self.judges:
            return Fidelity()
        questions = self.suites.get(task) or self.suites.get(ANY_TASK)
        if questions is None:
            single = [values[0] for values in facts if len(values) == 1]
            questions = questions_for(contexts, count=self.count, recorded=single, tools=self.settings.notes)
        flow = answers_judged(
            contexts.original,
            contexts.compacted,
            questions=questions,
            counter=self.conditions.counter,
            max_input=self.max_input,
        )
        return await drive(flow, step(flow), self.models)

    @property
    def total(self) -> Evaluated:
        before = sum(each.contexts.tokens_before for each in self.done)
        after = sum(each.contexts.tokens_after for each in self.done)
        coverage = sum((each.coverage for each in self.done), Coverage())
        fidelity = sum((each.fidelity for each in self.done), Fidelity())
        return Evaluated("all", len(self.done), Contexts((), (), before, after), coverage, fidelity)


@click.command()
@click.argument("file", type=FILE)
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
@click.option("--questions", type=FILE, help="Your own questions, YAML: a list for each task type, or `default`.")
@click.option("--count", type=click.IntRange(4, 20), default=10, help="Generated questions per compaction.")
@click.option("--budget", type=POSITIVE, default=UNLIMITED, show_default="none", help="The most tokens to spend.")
@click.option("--limit", type=POSITIVE, help="Only the first so many conversations.")
@click.option("--gate", type=click.FloatRange(0, 1), help="Exit with 1 if fidelity is lower, or nothing was judged.")
@click.option("--gate-coverage", type=click.FloatRange(0, 1), help="Exit with 1 if coverage is lower. Needs no model.")
@click.option("--answers", is_flag=True, help="Print every question with both answers, to check the judge.")
@config_option
@json_option
def evaluate(
    *,
    file: Path,
    policy: str,
    window: int | None,
    max_tokens: int | None,
    questions: Path | None,
    count: int,
    limit: int | None,
    gate: float | None,
    gate_coverage: float | None,
    answers: bool,
    path: Path | None,
    as_json: bool,
    **asking: Any,
) -> None:
    """Score what a policy's compactions keep of recorded conversations: coverage by code, fidelity by a model.

    FILE is as for weir replay. At every batch the whole conversation is compared with what was sent instead: which
    facts, identifiers and rules are still there, and with --model, which questions get the same answer. Questions are
    generated, or your own: a conversation's `meta.task` names its type. Fidelity is the share of consistent answers
    among those judged, and null if none was judged.

    \b
    Example:
      weir evaluate runs.jsonl --policy balanced --window 8192 --gate-coverage 0.85
      weir evaluate runs.jsonl --model gpt-5-mini --judge gpt-5 --questions suite.yaml --gate 0.85
    """
    model = asking["model"]
    if gate is not None and not model:
        raise click.UsageError("--gate is about judged answers and needs --model; see --gate-coverage")
    config = loaded(path, Flags(upstream=asking["upstream"], summarizer=asking["summarizer"]))
    settings = policy_named(policy, config)
    conditions = conditions_for(config, model=model, window=window, max_tokens=max_tokens)
    reads = asking["model_window"] or conditions.facts.window or settings.window or USUAL_WINDOW
    run = Evaluation(
        settings=settings,
        conditions=replace(conditions, model="", facts=ModelFacts()),
        models=_models_of(config, settings, asking),
        judges=model is not None,
        max_input=int(INPUT_SHARE * reads),
        suites={} if questions is None else suites_in(questions),
        count=count,
    )
    asyncio.run(run.run(file, limit))
    total = run.total
    scores = (("fidelity", total.fidelity.score(), gate), ("coverage", total.coverage.whole.value, gate_coverage))
    failures = [text for name, score, least in scores for text in _below(name, score, least)]
    if as_json:
        print_json(_report(run, total, failures, answers=answers))
    else:
        _show(run, total, answers=answers)
    for failure in failures:
        click.echo(f"weir: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)


def _models_of(config: Config, settings: ContextSettings, asking: Mapping[str, Any]) -> Models | None:
    """None where no model is to answer questions or to write summaries."""
    model = asking["model"] or ""
    writer = None if settings.summarizer == "same" else settings.summarizer
    if not model and (asking["summarizer"] is None or writer is None):
        return None
    if not config.upstreams:
        raise click.UsageError("--model needs an --upstream, a configuration with one, or OPENAI_API_KEY")
    by_purpose = {ANSWER.purpose: model, JUDGE.purpose: asking["judge"] or model}
    return Models(config=config, default=writer or model, by_purpose=by_purpose, tokens=asking["budget"])


def _below(name: str, score: float | None, least: float | None) -> Iterator[str]:
    if least is None:
        return
    if score is None:
        yield f"{name} was not measured, and the gate is {least:g}"
    elif score < least:
        yield f"{name} {score:.3f} is below the gate of {least:g}"


def _show(run: Evaluation, total: Evaluated, *, answers: bool) -> None:
    print_table(TITLES, [_row(each) for each in (*run.done, total)], numbers=1)
    if not run.done:
        return print_line("Nothing was compacted, so nothing was measured.")
    score = total.fidelity.score()
    kept = (f"{share['kept']} of {share['wanted']} {name}" for name, share in _shares(total.coverage).items())
    print_line(f"Kept: {', '.join(kept)}.")
    if total.coverage.missing:
        print_line(f"Not kept, but archived or gone: {'; '.join(total.coverage.missing[:MAX_MISSING])}")
    if score is not None and score < TOO_AGGRESSIVE:
        print_line(f"Fidelity under {TOO_AGGRESSIVE} says that too much is taken: raise low_water, tail or extract.")
    if run.models is not None:
        spent = run.models.spent
        print_line(f"The models took {spent.calls} calls, {spent.asked:,} tokens asked, {spent.answered:,} answered.")
        reasons = total.fidelity.unknown | {f"call: {code}": n for code, n in run.models.failures.items()}
        if reasons:
            print_line("Not decided: " + ", ".join(f"{n} {why}" for why, n in reasons.items()) + ".")
    for each in run.done if answers else ():
        for judged in each.fidelity.judged:
            print_line(f"\n{each.conversation}, request {each.request}: {judged.question.text}")
            print_line(f"  whole:     {' '.join(judged.original.split())}")
            print_line(f"  compacted: {' '.join(judged.compacted.split())}")
            print_line(f"  verdict:   {judged.verdict}{f' ({judged.why})' if judged.why else ''}")
    return None


def _row(each: Evaluated) -> tuple[str, ...]:
    values = _figures(each)
    counts = "/".join(str(values[name]) for name in ("consistent", "inconsistent", "unknown"))
    ratio = values["compression_ratio"]
    return (
        each.conversation,
        str(each.request),
        f"{each.contexts.tokens_before:,}",
        f"{each.contexts.tokens_after:,}",
        "null" if ratio is None else f"{ratio:.2f}x",
        *(_percent(values[name]) for name in ("coverage", "recoverable", "score", *Dimension)),
        counts if each.fidelity.judged else "null",
    )


def _percent(value: Any) -> str:
    return "null" if value is None else f"{value:.1%}"


def _figures(each: Evaluated) -> dict[str, Any]:
    contexts = each.contexts
    fidelity = each.fidelity
    after = contexts.tokens_after
    return {
        "tokens_before": contexts.tokens_before,
        "tokens_after": after,
        "compression_ratio": contexts.tokens_before / after if after else None,
        "coverage": each.coverage.whole.value,
        "recoverable": each.coverage.whole.recoverable,
        "score": fidelity.score(),
        **{dimension.value: fidelity.score(dimension) for dimension in Dimension},
        "consistent": fidelity.count(AnswerVerdict.YES),
        "inconsistent": fidelity.count(AnswerVerdict.NO),
        "unknown": fidelity.count(AnswerVerdict.UNKNOWN),
        "unknown_because": fidelity.unknown,
        **_shares(each.coverage),
    }


def _shares(coverage: Coverage) -> dict[str, dict[str, Any]]:
    shares = {"facts": coverage.facts, "identifiers": coverage.identifiers, "rules": coverage.rules}
    return {
        name: {"wanted": share.wanted, "kept": share.kept, "share": share.value, "recoverable": share.recoverable}
        for name, share in shares.items()
    }


def _report(run: Evaluation, total: Evaluated, failures: Sequence[str], *, answers: bool) -> dict[str, object]:
    models = run.models
    return {
        "policy": run.settings.name,
        "prompts": {prompt.purpose: prompt.digest for prompt in PROMPTS.values()},
        "conversations": len({each.conversation for each in run.done}),
        "compactions": [
            {"conversation": each.conversation, "request": each.request, **_figures(each)}
            | ({"answers": [msgspec.to_builtins(judged) for judged in each.fidelity.judged]} if answers else {})
            for each in run.done
        ],
        "total": _figures(total),
        "missing": list(total.coverage.missing),
        "spent": msgspec.structs.asdict(Spent() if models is None else models.spent),
        "failures": {} if models is None else dict(models.failures),
        "passed": not failures,
        "below": list(failures),
    }
