"""``weir evaluate``: what compactions left of conversations, by code alone and as a model judges it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from policies import ContextSettings, Effect, Reply
from policies.fidelity import ANSWER, JUDGE, MAX_QUESTIONS, MIN_QUESTIONS, PROPOSE, Terms
from proxy.asking import AT_ONCE, SECONDS, Models
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations_read import checkpoints_of, found, opened_to_read, store_option
from proxy.cli.evaluate_report import Report, judged_below, report_json, report_lines, report_table
from proxy.cli.progress import Moved, progress
from proxy.cli.replay import DEFAULT_ENCODING, policy_named
from proxy.config import Config, Flags
from proxy.models import ModelFacts, ModelRegistry
from proxy.rehearsal import BadRecording, Conditions, Script, read_recordings, recording_of
from proxy.rehearsal.compactions import Compaction, archived_pair, compactions_of
from proxy.rehearsal.judging import Evaluated, judge_compaction
from proxy.rehearsal.lanes import Managed
from proxy.tokenizer import Tokenizer
from proxy.wire.raw import read_value

SHARE = 0.7
"""Share of a model's window that a question with its material may take: its tokenizer may be another one."""
DEFAULT_QUESTIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is evaluated, and by whom; ``terms`` is None where no model answers."""

    file: Path | None
    conversation: str | None
    config: Config
    settings: ContextSettings
    conditions: Conditions
    questions: int
    limit: int | None
    terms: Terms | None
    models: Models | None


@dataclass(slots=True)
class _Asked:
    """The models of a run, asked from the planner's thread too."""

    models: Models
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __call__(self, effect: Effect) -> Reply:
        return asyncio.run_coroutine_threadsafe(self.models(effect), self.loop).result()


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--conversation", metavar="ID", help="Instead of a file: the summaries of one stored conversation.")
@click.option("--policy", default="balanced", show_default=True, help="A policy's name, or FILE.yaml:NAME.")
@click.option("--window", type=click.IntRange(min=256), help="The window to compact for, tokens; else the policy's.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="What each request asks for; else the policy's reserve.")
@click.option("--model", default="", help="Who answers the questions; without it only the deterministic score.")
@click.option("--judge", default="", help="Who compares the answers; else the same model.")
@click.option("--summarizer", help="Who writes summaries, as --model does with `same`; else the policy's, or code.")
@click.option("--upstream", metavar="URL", help="The models' server; else the configuration's. OPENAI_API_KEY is sent.")
@click.option("--model-window", type=click.IntRange(min=1024), help="What the models read at once, tokens.")
@click.option(
    "--questions",
    type=click.IntRange(MIN_QUESTIONS, MAX_QUESTIONS),
    default=DEFAULT_QUESTIONS,
    show_default=True,
    help="Asked of each.",
)
@click.option("--propose", type=click.IntRange(0, 10), default=0, help="More questions, written by the model.")
@click.option("--budget", type=click.IntRange(min=1), help="Most tokens that the models may take.")
@click.option(
    "--at-once", type=click.IntRange(1, 8), default=AT_ONCE, show_default=True, help="Questions side by side."
)
@click.option("--seconds", type=click.FloatRange(min=1), default=SECONDS, show_default=True, help="Wait for an answer.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many conversations, from the beginning.")
@click.option("--gate", type=click.FloatRange(0, 1), help="Exit 1 where fidelity is below, or nothing was judged.")
@click.option("--gate-coverage", type=click.FloatRange(0, 1), help="Exit 1 where coverage is below. Needs no model.")
@click.option("--answers", is_flag=True, help="Every question with both answers, for somebody to check the judge.")
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
    model: str,
    judge: str,
    summarizer: str | None,
    upstream: str | None,
    model_window: int | None,
    questions: int,
    propose: int,
    budget: int | None,
    at_once: int,
    seconds: float,
    limit: int | None,
    gate: float | None,
    gate_coverage: float | None,
    answers: bool,
    path: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """What a policy's compactions leave of recorded conversations: coverage by code, fidelity by a model.

    FILE is what weir replay takes. At every batch the whole conversation and what went up in its place are compared:
    which facts, identifiers and rules are still there, and with --model, which of 4 to 20 questions it still answers
    alike. Fidelity is consistent over judged answers, and null where nothing was judged.

    \b
    Example:
      weir evaluate runs.jsonl --policy balanced --window 8192 --gate-coverage 0.85
      weir evaluate runs.jsonl --model gpt-5-mini --judge gpt-5 --gate 0.85
      weir evaluate --conversation support-4711 --model gpt-5-mini --answers
    """
    if (file is None) == (conversation is None):
        raise click.UsageError("name a file or a --conversation, one of them")
    if gate is not None and not model:
        raise click.UsageError("--gate is about judged answers and needs --model; see --gate-coverage")
    config = loaded(path, Flags(upstream=upstream, store=store, summarizer=summarizer))
    settings = policy_named(policy, config)
    asks = bool(model) or (summarizer is not None and settings.summarizer not in (None, "same"))
    if asks and not config.upstreams:
        raise click.UsageError("--model needs an --upstream, a configuration with one, or OPENAI_API_KEY")
    tokenizer = Tokenizer()
    facts = ModelRegistry(config.models).facts(model, settings=ContextSettings()) if model else ModelFacts()
    counter = tokenizer.counter(model or DEFAULT_ENCODING)
    reads = model_window or facts.window
    terms = None
    if model:
        limit_of = int(SHARE * (reads or settings.window or 8192))
        terms = Terms(counter=counter, max_input=limit_of, judge_input=limit_of, propose=propose)
    by_purpose = {ANSWER.purpose: model, PROPOSE.purpose: model, JUDGE.purpose: judge or model}
    default = settings.summarizer if settings.summarizer not in (None, "same") else model
    task = Task(
        file=file,
        conversation=conversation,
        config=config,
        settings=settings,
        conditions=Conditions(counter=counter, window=window or config.window, max_tokens=max_tokens),
        questions=questions,
        limit=limit,
        terms=terms,
        models=Models(
            config, default=default or "", by_purpose=by_purpose, tokens=budget, at_once=at_once, seconds=seconds
        )
        if asks
        else None,
    )
    report = Report(model=model, judge=judge or model, policy=settings.name)
    try:
        asyncio.run(_run(task, report))
    except BadRecording as fault:
        raise click.UsageError(str(fault)) from None
    finally:
        tokenizer.close()
    _show(report, answers=answers, as_json=as_json, gates=(gate, gate_coverage))


def _show(report: Report, *, answers: bool, as_json: bool, gates: tuple[float | None, float | None]) -> None:
    failures = judged_below(report, gate=gates[0], gate_coverage=gates[1])
    if as_json:
        print_json(report_json(report, answers=answers, failures=failures))
    else:
        out = console()
        out.print(report_table(report))
        for line in report_lines(report, answers=answers):
            out.print(line, soft_wrap=True, markup=False)
    for failure in failures:
        click.echo(f"weir: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)


async def _run(task: Task, report: Report) -> None:
    size = task.file.stat().st_size if task.file is not None and task.file.is_file() else 0
    async with AsyncExitStack() as stack:
        if task.models is not None:
            await stack.enter_async_context(task.models)
        moved = stack.enter_context(progress(size))
        pairs = _recorded(task, moved) if task.file is not None else _stored(task)
        async for name, compaction, read in pairs:
            done = await _judged(task, compaction)
            report.add(name, done)
            if task.models is not None:
                report.spent, report.failures = task.models.spent, task.models.failures
            moved(read, len(report.names), f", {report.spent.calls} calls" if task.models is not None else "")


async def _judged(task: Task, compaction: Compaction) -> Evaluated:
    asks = task.terms is not None
    return await judge_compaction(
        compaction,
        count=task.questions,
        tools=task.settings.notes,
        ask=task.models if asks else None,
        terms=task.terms,
    )


async def _recorded(task: Task, moved: Moved) -> AsyncIterator[tuple[str, Compaction, int]]:
    """The batches of every recorded conversation; the planner works in a thread, because it may wait for a model."""
    assert task.file is not None  # noqa: S101 - the caller looked
    writes = task.models is not None and task.settings.summarizer is not None
    for number, place in enumerate(read_recordings(task.file), start=1):
        script = Script(place.recording, counter=task.conditions.counter, model=task.conditions.model)
        ask = _Asked(task.models) if writes and task.models is not None else None
        batches = compactions_of(script, Managed(task.settings, task.conditions, ask=ask))
        while (compaction := await asyncio.to_thread(next, batches, None)) is not None:
            yield place.recording.id, compaction, place.read
        moved(place.read, number)
        if number == task.limit:
            return


async def _stored(task: Task) -> AsyncIterator[tuple[str, Compaction, int]]:
    """The summaries of a stored conversation with the originals that they stand for."""
    assert task.conversation is not None  # noqa: S101 - the caller looked
    async with opened_to_read(task.config.store.url) as store:
        row = await found(store, task.conversation)
        cuts = {c.cut.ref: c.cut for c in await checkpoints_of(store, row) if c.cut is not None and c.cut.text}
        for cut in cuts.values():
            originals = await store.covered(row.tenant, cut.ref)
            messages = [value for one in originals if isinstance(value := read_value(one.body), dict)]
            if messages:
                recording = recording_of(messages, name=f"{row.name} v{cut.version}")
                script = Script(recording, counter=task.conditions.counter, model="")
                yield recording.id, archived_pair(recording, cut, script=script), 0
