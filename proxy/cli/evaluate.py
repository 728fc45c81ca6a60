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
    """One compaction, or several together; ``request`` is how many messages its request had, or how many they are."""

    conversation: str
    request: int
    before: int
    after: int
    coverage: Coverage
    fidelity: Fidelity = field(default_factory=Fidelity)

    def values(self) -> dict[str, Any]:
        coverage = self.coverage
        fidelity = self.fidelity
        kinds = {"facts": coverage.facts, "identifiers": coverage.identifiers, "rules": coverage.rules}
        return {
            "conversation": self.conversation,
            "request": self.request,
            "tokens_before": self.before,
            "tokens_after": self.after,
            "compression_ratio": self.before / self.after if self.after else None,
            "coverage": coverage.whole.value,
            "recoverable": coverage.whole.recoverable,
            "score": fidelity.score(),
            **{dimension.value: fidelity.score(dimension) for dimension in Dimension},
            "consistent": fidelity.count(AnswerVerdict.YES),
            "inconsistent": fidelity.count(AnswerVerdict.NO),
            "unknown": fidelity.count(AnswerVerdict.UNKNOWN),
            "unknown_because": fidelity.unknown,
            **{kind: msgspec.to_builtins(share) for kind, share in kinds.items()},
        }

    def row(self) -> tuple[str, ...]:
        values = self.values()
        verdicts = "/".join(str(values[name]) for name in ("consistent", "inconsistent", "unknown"))
        shares = [values[name] for name in ("coverage", "recoverable", "score", *Dimension)]
        return (
            self.conversation,
            str(self.request),
            f"{self.before:,}",
            f"{self.after:,}",
            f"{values['compression_ratio'] or 0:.2f}x",
            *("null" if share is None else f"{share:.1%}" for share in shares),
            verdicts if self.fidelity.judged else "null",
        )


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One run; ``models`` write summaries if the policy has any, and answer questions where ``judges``."""

    settings: ContextSettings
    conditions: Conditions
    models: Models | None
    judges: bool
    max_input: int
    suites: Mapping[str, tuple[Question, ...]]
    count: int

    async def run(self, file: Path, limit: int | None) -> list[Evaluated]:
        done: list[Evaluated] = []
        async with store_in_memory() as store:
            with progress("conversations") as progressed:
                for place in recorded(file, limit, progressed):
                    writes = self.models if self.settings.summarizer is not None else None
                    scenario = Managed(self.settings, self.conditions, store, ask=writes)
                    done += [each async for each in self.compactions(place.recording, scenario)]
                    await scenario.close()
        if self.models is not None:
            await self.models.aclose()
        return done

    async def compactions(self, recording: Recording, scenario: Managed) -> AsyncIterator[Evaluated]:
        script = Script(recording, counter=self.conditions.counter, model="")
        archived: set[int] = set()
        for request in script.requests:
            length = request.length
            sent = await scenario.forward(script, length)
            archived |= set(sent.removed)
            if not sent.new or sent.pieces is None:
                continue
            later = tuple(call for at in range(length, len(recording.values)) for call in script.read(at).calls)
            contexts = contexts_of(script.transcript(length), sent.pieces, later)
            facts = [f.needles for f in recording.facts if not f.needed_at or any(at >= length for at in f.needed_at)]
            text = "\n".join(script.text(index) for index in sorted(archived))
            coverage = coverage_of(contexts, facts=facts, archived=text, tools=self.settings.notes)
            fidelity = await self._judged(contexts, recording.task)
            yield Evaluated(recording.id, length, contexts.tokens_before, contexts.tokens_after, coverage, fidelity)

    async def _judged(self, contexts: Contexts, task: str) -> Fidelity:
        if self.models is None or not self.judges:
            return Fidelity()
        questions = self.suites.get(task) or self.suites.get(ANY_TASK)
        flow = answers_judged(
            contexts.original,
            contexts.compacted,
            questions=questions or questions_for(contexts, count=self.count, tools=self.settings.notes),
            counter=self.conditions.counter,
            max_input=self.max_input,
        )
        return await drive(flow, step(flow), self.models)


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
    model: str | None,
    model_window: int | None,
    questions: Path | None,
    count: int,
    limit: int | None,
    answers: bool,
    path: Path | None,
    as_json: bool,
    **given: Any,
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
    if given["gate"] is not None and model is None:
        raise click.UsageError("--gate is about judged answers and needs --model; see --gate-coverage")
    config = loaded(path, Flags(upstream=given["upstream"], summarizer=given["summarizer"]))
    settings = policy_named(policy, config)
    conditions = conditions_for(config, model=model, window=window, max_tokens=max_tokens)
    reads = model_window or conditions.facts.window or settings.window or USUAL_WINDOW
    models = _models_of(config, settings, model, given)
    run = Evaluation(
        settings=settings,
        conditions=replace(conditions, model="", facts=ModelFacts()),
        models=models,
        judges=model is not None,
        max_input=int(INPUT_SHARE * reads),
        suites={} if questions is None else suites_in(questions),
        count=count,
    )
    done = asyncio.run(run.run(file, limit))
    total = Evaluated(
        "all",
        len(done),
        sum(each.before for each in done),
        sum(each.after for each in done),
        sum((each.coverage for each in done), Coverage()),
        sum((each.fidelity for each in done), Fidelity()),
    )
    scores = {"fidelity": total.fidelity.score(), "coverage": total.coverage.whole.value}
    gates = {"fidelity": given["gate"], "coverage": given["gate_coverage"]}
    failures = [text for name, least in gates.items() for text in _below(name, scores[name], least)]
    if as_json:
        print_json(_report(done, total, models, failures, answers=answers) | {"policy": policy})
    else:
        print_table(TITLES, [each.row() for each in (*done, total)], numbers=1)
        for line in _lines(done, total, models, answers=answers):
            print_line(line)
    for failure in failures:
        click.echo(f"weir: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)


def _models_of(config: Config, settings: ContextSettings, model: str | None, given: Mapping[str, Any]) -> Models | None:
    """None where no model is to answer questions or to write summaries."""
    writer = None if settings.summarizer == "same" else settings.summarizer
    if model is None and (given["summarizer"] is None or writer is None):
        return None
    if not config.upstreams:
        raise click.UsageError("--model needs an --upstream, a configuration with one, or OPENAI_API_KEY")
    answers = model or ""
    by_purpose = {ANSWER.purpose: answers, JUDGE.purpose: given["judge"] or answers}
    return Models(config=config, default=writer or answers, by_purpose=by_purpose, tokens=given["budget"])


def _below(name: str, score: float | None, least: float | None) -> Iterator[str]:
    if least is not None and score is None:
        yield f"{name} was not measured, and the gate is {least:g}"
    elif least is not None and score is not None and score < least:
        yield f"{name} {score:.3f} is below the gate of {least:g}"


def _lines(done: Sequence[Evaluated], total: Evaluated, models: Models | None, *, answers: bool) -> Iterator[str]:
    if not done:
        yield "Nothing was compacted, so nothing was measured."
    if total.coverage.missing:
        yield f"Not kept, but archived or gone: {'; '.join(total.coverage.missing[:MAX_MISSING])}"
    score = total.fidelity.score()
    if score is not None and score < TOO_AGGRESSIVE:
        yield f"Fidelity under {TOO_AGGRESSIVE} says that too much is taken: raise low_water, tail or extract."
    if models is not None:
        spent = models.spent
        yield f"The models took {spent.calls} calls, {spent.asked:,} tokens asked, {spent.answered:,} answered."
    if reasons := total.fidelity.unknown:
        yield "Not decided: " + ", ".join(f"{count} {why}" for why, count in reasons.items()) + "."
    for each in done if answers else ():
        for judged in each.fidelity.judged:
            yield f"\n{each.conversation}, request {each.request}: {judged.question.text}"
            yield f"  whole:     {' '.join(judged.original.split())}"
            yield f"  compacted: {' '.join(judged.compacted.split())}"
            yield f"  verdict:   {judged.verdict}{f' ({judged.why})' if judged.why else ''}"


def _report(
    done: Sequence[Evaluated], total: Evaluated, models: Models | None, failures: Sequence[str], *, answers: bool
) -> dict[str, object]:
    return {
        "prompts": {prompt.purpose: prompt.digest for prompt in PROMPTS.values()},
        "compactions": [
            each.values() | ({"answers": msgspec.to_builtins(each.fidelity.judged)} if answers else {}) for each in done
        ],
        "total": total.values(),
        "missing": total.coverage.missing,
        "spent": msgspec.structs.asdict(Spent() if models is None else models.spent),
        "failures": {} if models is None else models.failures,
        "passed": not failures,
        "below": failures,
    }
