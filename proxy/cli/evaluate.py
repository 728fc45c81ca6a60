"""``weir evaluate``: what a policy's compactions leave of recorded conversations, by code and as a
model judges it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from policies.effects import Failed, Summarize, Summary, step
from policies.quality.coverage import (
    Contexts,
    Coverage,
    Dimension,
    Question,
    contexts_of,
    coverage_of,
    questions_for,
)
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
from proxy.features.replay.scenarios import Managed, store_in_memory
from proxy.features.replay.script import Script
from proxy.models.facts import ModelFacts
from proxy.upstream.client import Client, Upstreams, providers_for

SECONDS = 300.0
"""Longest wait for one answer: no client waits for it, and a local model may be slow.
"""
AT_ONCE = 4
TENANT = "0" * 32
UNLIMITED = 1 << 60
INPUT_SHARE = 0.7
"""Share of a model's window that a question with its material may take: its tokenizer may differ.
"""
USUAL_WINDOW = 8_192
CHARACTERS_A_TOKEN = 4
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
    """Calls models: by purpose another than the ``default``, all together for so many ``tokens`` at
    most.
    """

    config: Config
    default: str
    by_purpose: Mapping[str, str] = field(default_factory=dict)
    tokens: int = UNLIMITED
    taken: int = 0
    spent: Spent = field(default_factory=Spent)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _upstreams: Upstreams = field(init=False)
    _summarizer: Summarizer = field(init=False, default_factory=Summarizer)

    def __post_init__(self) -> None:
        self._upstreams = Upstreams(
            Client(instance="evaluate"), providers_for(self.config.upstreams.values())
        )

    async def aclose(self) -> None:
        await self._summarizer.close()
        await self._upstreams.close()

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        model = self.by_purpose.get(effect.purpose, self.default)
        upstream = upstream_for(self.config, model)
        terms = SummarizerTerms(tenant=TENANT, upstream=upstream.name, model=model, seconds=SECONDS)
        caller = Caller(tenant=TENANT, credential=os.environ.get("OPENAI_API_KEY", "").encode())
        destination = by_weir(upstream, caller, path=CHAT_PATH, model=model)
        send = partial(self._upstreams.post, destination)
        most = (len(effect.system) + len(effect.prompt)) // CHARACTERS_A_TOKEN + effect.max_tokens
        async with self._turns:  # a server with one slot makes the others wait while time runs
            if self.taken + most > self.tokens:
                return Failed("budget")
            self.taken += most
            done = await self._summarizer.ask(effect, terms=terms, send=send)
        if done.usage is not None and done.usage.prompt is not None:
            self.taken += done.usage.prompt + (done.usage.completion or 0) - most
        if done.usage is not None:
            self.spent += Spent(
                calls=1, asked=done.usage.prompt or 0, answered=done.usage.completion or 0
            )
        elif done.source == "asked":
            self.spent += Spent(calls=1)
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
    """One compaction, or several together; ``request`` is how many messages its request had, or how
    many they are.
    """

    conversation: str
    request: int
    before: int
    after: int
    coverage: Coverage
    fidelity: Fidelity

    def values(self) -> dict[str, Any]:
        fidelity = self.fidelity
        return {
            "conversation": self.conversation,
            "request": self.request,
            "tokens_before": self.before,
            "tokens_after": self.after,
            "compression_ratio": self.before / self.after if self.after else None,
            "coverage": self.coverage.whole.value,
            "recoverable": self.coverage.whole.recoverable,
            "score": fidelity.score(),
            **{dimension.value: fidelity.score(dimension) for dimension in Dimension},
            **{verdict.value: fidelity.count(verdict) for verdict in AnswerVerdict},
            "unknown_because": fidelity.unknown,
            "kinds": msgspec.to_builtins(self.coverage.kinds),
        }

    def row(self) -> tuple[str, ...]:
        values = self.values()
        shares = [values[name] for name in ("coverage", "recoverable", "score", *Dimension)]
        return (
            self.conversation,
            str(self.request),
            f"{self.before:,}",
            f"{self.after:,}",
            f"{values['compression_ratio'] or 0:.2f}x",
            *("null" if share is None else f"{share:.1%}" for share in shares),
            (
                "/".join(str(values[verdict]) for verdict in AnswerVerdict)
                if self.fidelity.judged
                else "null"
            ),
        )


async def compactions(
    script: Script, scenario: Managed
) -> AsyncIterator[tuple[int, Contexts, Coverage]]:
    """For each batch the messages of its request, what was sent for them, and what that keeps of
    the whole.
    """
    recording = script.recording
    archived: set[int] = set()
    for length in (request.length for request in script.requests):
        sent = await scenario.forward(script, length)
        archived |= set(sent.removed)
        if not sent.new or sent.pieces is None:
            continue
        later = tuple(
            call for at in range(length, len(recording.values)) for call in script.read(at).calls
        )
        contexts = contexts_of(script.transcript(length), sent.pieces, later)
        facts = [
            f.needles
            for f in recording.facts
            if not f.needed_at or any(at >= length for at in f.needed_at)
        ]
        text = "\n".join(script.text(index) for index in sorted(archived))
        yield length, contexts, coverage_of(contexts, facts=facts, archived=text)
    await scenario.close()


@click.command()
@click.argument("file", type=FILE)
@click.option("--policy", default="balanced", help="A policy's name, or FILE.yaml:NAME.")
@click.option(
    "--window", type=click.IntRange(min=256), help="The window, tokens; defaults to the policy's."
)
@click.option(
    "--max-tokens",
    type=POSITIVE,
    help="The max_tokens of each request; defaults to the policy's reserve.",
)
@click.option(
    "--model", help="The model that answers questions; without it only coverage is scored."
)
@click.option("--judge", help="The model that compares the answers; defaults to --model.")
@click.option(
    "--summarizer",
    help="The model that writes summaries, `same` for --model; defaults to the policy's.",
)
@click.option(
    "--upstream",
    metavar="URL",
    help="The models' server, not the configuration's; gets OPENAI_API_KEY.",
)
@click.option(
    "--model-window", type=click.IntRange(min=1024), help="The models' context window, tokens."
)
@click.option(
    "--questions",
    type=FILE,
    help="Your own questions, YAML: a list for each task type, or `default`.",
)
@click.option(
    "--count", type=click.IntRange(4, 20), default=10, help="Generated questions per compaction."
)
@click.option(
    "--budget",
    type=POSITIVE,
    default=UNLIMITED,
    show_default="none",
    help="The most tokens to spend.",
)
@click.option("--limit", type=POSITIVE, help="Only the first so many conversations.")
@click.option(
    "--gate",
    type=click.FloatRange(0, 1),
    help="Exit with 1 if fidelity is lower, or nothing was judged.",
)
@click.option(
    "--gate-coverage",
    type=click.FloatRange(0, 1),
    help="Exit with 1 if coverage is lower. Needs no model.",
)
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
    path: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Score what a policy's compactions keep of recorded conversations: coverage by code, fidelity
    by a model.

    FILE is as for weir replay. At every batch the whole conversation is compared with what was sent
    instead: which facts, identifiers and rules are still there, and with --model, which questions
    get the same answer. Questions are generated, or your own: a conversation's `meta.task` names
    its type. Fidelity is the share of consistent answers among those judged, and null if none was
    judged. With --json every answer is there, to check the judge.

    \b
    Example:
      weir evaluate runs.jsonl --policy balanced --window 8192 --gate-coverage 0.85
      weir evaluate runs.jsonl --model gpt-5-mini --judge gpt-5 --questions suite.yaml --gate 0.85
    """
    if given["gate"] is not None and model is None:
        raise click.UsageError(
            "--gate is about judged answers and needs --model; see --gate-coverage"
        )
    config = loaded(path, Flags(upstream=given["upstream"], summarizer=given["summarizer"]))
    settings = policy_named(policy, config)
    conditions = conditions_for(config, model=model, window=window, max_tokens=max_tokens)
    reads = model_window or conditions.facts.window or settings.window or USUAL_WINDOW
    conditions = replace(conditions, model="", facts=ModelFacts())
    suites = {} if questions is None else suites_in(questions)
    models = _models_of(config, settings, model, given)
    done: list[Evaluated] = []

    async def judged(contexts: Contexts, task: str) -> Fidelity:
        if models is None or model is None:
            return Fidelity()
        own = suites.get(task) or suites.get(ANY_TASK)
        flow = answers_judged(
            contexts.original,
            contexts.compacted,
            questions=own or questions_for(contexts, count=count),
            counter=conditions.counter,
            max_input=int(INPUT_SHARE * reads),
        )
        return await drive(flow, step(flow), models)

    async def run() -> None:
        async with (
            store_in_memory() as store,
            nullcontext() if models is None else aclosing(models),
        ):
            with progress("conversations") as progressed:
                for place in recorded(file, limit, progressed):
                    script = Script(place.recording, counter=conditions.counter, model="")
                    writes = models if settings.summarizer is not None else None
                    scenario = Managed(settings, conditions, store, ask=writes)
                    async for length, contexts, coverage in compactions(script, scenario):
                        fidelity = await judged(contexts, place.recording.task)
                        sizes = (contexts.tokens_before, contexts.tokens_after)
                        done.append(
                            Evaluated(place.recording.id, length, *sizes, coverage, fidelity)
                        )

    asyncio.run(run())
    total = Evaluated(
        "all",
        len(done),
        sum(each.before for each in done),
        sum(each.after for each in done),
        sum((each.coverage for each in done), Coverage()),
        sum((each.fidelity for each in done), Fidelity()),
    )
    failures = [
        *_below("fidelity", total.fidelity.score(), given["gate"]),
        *_below("coverage", total.coverage.whole.value, given["gate_coverage"]),
    ]
    spent = Spent() if models is None else models.spent
    if as_json:
        print_json(
            {
                "policy": policy,
                "prompts": {prompt.purpose: prompt.digest for prompt in PROMPTS.values()},
                "compactions": [
                    each.values() | {"answers": msgspec.to_builtins(each.fidelity.judged)}
                    for each in done
                ],
                "total": total.values(),
                "missing": total.coverage.missing,
                "spent": msgspec.structs.asdict(spent),
                "passed": not failures,
            }
        )
    else:
        print_table(TITLES, [each.row() for each in (*done, total)], numbers=1)
        for line in _lines(total, spent):
            print_line(line)
    for failure in failures:
        click.echo(f"weir: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)


def _models_of(
    config: Config, settings: ContextSettings, model: str | None, given: Mapping[str, Any]
) -> Models | None:
    """None where no model is to answer questions or to write summaries."""
    writer = None if settings.summarizer == "same" else settings.summarizer
    if model is None and (given["summarizer"] is None or writer is None):
        return None
    if not config.upstreams:
        raise click.UsageError(
            "--model needs an --upstream, a configuration with one, or OPENAI_API_KEY"
        )
    answers = model or ""
    by_purpose = {ANSWER.purpose: answers, JUDGE.purpose: given["judge"] or answers}
    return Models(
        config=config, default=writer or answers, by_purpose=by_purpose, tokens=given["budget"]
    )


def _below(name: str, score: float | None, least: float | None) -> Iterator[str]:
    if least is not None and score is None:
        yield f"{name} was not measured, and the gate is {least:g}"
    elif least is not None and score is not None and score < least:
        yield f"{name} {score:.3f} is below the gate of {least:g}"


def _lines(total: Evaluated, spent: Spent) -> Iterator[str]:
    score = total.fidelity.score()
    if not total.request:
        yield "Nothing was compacted, so nothing was measured."
    if total.coverage.missing:
        yield f"Not kept, but archived or gone: {'; '.join(total.coverage.missing[:MAX_MISSING])}"
    if score is not None and score < TOO_AGGRESSIVE:
        yield (
            f"Fidelity under {TOO_AGGRESSIVE} says that too much is taken: raise low_water, tail or"
            " extract."
        )
    if spent.calls:
        yield (
            f"The models took {spent.calls} calls, {spent.asked:,} tokens asked, {spent.answered:,}"
            " answered."
        )
    if total.fidelity.unknown:
        yield (
            "Not decided: "
            + ", ".join(f"{n} {why}" for why, n in total.fidelity.unknown.items())
            + "."
        )
