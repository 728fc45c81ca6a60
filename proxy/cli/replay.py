"""``weir replay``: recorded conversations played through policies, without a model and without a network."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import click

from policies.ledger import Cut
from policies.quality.advise import PROVIDERS, Advice, recommend, worst_tools
from policies.settings import ContextSettings
from proxy.cli import Failure
from proxy.cli.output import Progressed, print_line, print_table, progress
from proxy.cli.shared import FILE, POSITIVE, Findings, counted, found, known_policy, loaded, reading, stored
from proxy.cli.usage import worst_json
from proxy.config.values import Config
from proxy.http.archive import checkpoints_of
from proxy.models.facts import BadPrices, ModelRegistry, PriceList, price_list
from proxy.replay.play import Replayed, Step, Tally
from proxy.replay.play import replay as play
from proxy.replay.report import COLUMNS, ReplayReport, remarks, render_report, table_row
from proxy.replay.scenarios import (
    SLIDING,
    UNMANAGED,
    Conditions,
    TrafficCount,
    advice_for,
    advised,
    pace_of,
    store_in_memory,
)
from proxy.replay.script import BadRecording, Place, Recording, Script, read_recordings, recording_of
from proxy.store import Store
from proxy.store.records import ExchangeRow
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import read_value

MAX_DRAWN = 6
STEP_TITLES = ("request", "messages", "before", "after", "limit", "action", "reuse", "cost", "against unmanaged")


@dataclass(slots=True, kw_only=True)
class _ReplayRun:
    file: Path
    policies: tuple[ContextSettings, ...]
    conditions: Conditions
    prices: PriceList
    advise: bool
    keep_steps: bool
    drawn: int
    totals: dict[str, Tally] = field(default_factory=dict)
    kept: list[Replayed] = field(default_factory=list)
    each: list[dict[str, object]] = field(default_factory=list)
    traffic: TrafficCount = field(default_factory=TrafficCount)
    advice: Advice | None = None

    async def play(self, place: Place, store: Store) -> None:
        conditions, prices = self.conditions, self.prices.prices
        script = Script(place.recording, counter=conditions.counter, model=conditions.model)
        policies = list(self.policies)
        for settings in self.policies if self.advise else ():
            advice = advice_for(pace_of(script), settings, conditions, prices)
            self.advice = self.advice or advice
            policies.append(advised(settings, advice))
        done = await play(script, policies, conditions, prices, store, keep_steps=self.keep_steps)
        self.traffic.add(script)
        for scenario in done.scenarios:
            self.totals.setdefault(scenario.name, Tally()).add(scenario.tally)
        figures = {scenario.name: scenario.tally.values() for scenario in done.scenarios}
        self.each.append({"id": done.id, "line": done.line, "policies": figures})
        if self.keep_steps:
            self.kept.append(done)
        if self.drawn and len(self.kept) > self.drawn:
            self.kept.remove(min(self.kept, key=_length))


@click.command()
@click.argument("source", metavar="FILE|CONVERSATION")
@click.option("--policy", default="balanced", help="A policy's name, or FILE.yaml:NAME.")
@click.option("--compare", multiple=True, metavar="POLICY", help="Another policy to compare; may be repeated.")
@click.option("--window", type=click.IntRange(min=256), help="Tokens; defaults to the model's, or the CONVERSATION's.")
@click.option("--model", help="The model, for its tokenizer, window and prices; defaults to the CONVERSATION's.")
@click.option("--max-tokens", type=POSITIVE, help="The max_tokens of each request; defaults to the policy's reserve.")
@click.option("--limit", type=POSITIVE, help="Only the first so many conversations.")
@click.option("--prices", "stated", help=f"One of {', '.join(PROVIDERS)}, or input,read,write,output in $ a million.")
@click.option("--advise", "advise_too", is_flag=True, help="Also play each policy with its cheapest trigger.")
@click.option("--steps", is_flag=True, help="Also show each request.")
@click.option("--html", type=FILE, metavar="OUT", help="Write a report with plots.")
@stored
def replay(
    config: Config,
    *,
    source: str,
    policy: str,
    compare: tuple[str, ...],
    window: int | None,
    model: str | None,
    max_tokens: int | None,
    limit: int | None,
    stated: str | None,
    advise_too: bool,
    steps: bool,
    html: Path | None,
) -> Findings:
    """Play recorded or stored conversations through policies: tokens, actions, prefix reuse, cost. A dry run.

    FILE has one conversation per line, {"messages": […]}, optionally with "tools" and "meta". Each assistant message
    is one request. No model is called and nothing is sent anywhere. A CONVERSATION, by name or id, is read from the
    database: of it that is stored word for word which left the window, up to the newest summary.

    \b
    Example:
      weir replay sessions.jsonl --policy balanced --window 8192
      weir replay support-4711 --compare article-128k --steps
      weir replay sessions.jsonl --compare weir.yaml:support --html report.html
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {html.parent}", param_hint="--html")

    file, one, served = Path(source), None, None
    if not file.exists() and not file.suffix:
        one, row = reading(config, lambda store: _kept(store, source))
        model, served = model or row.model, None if model else row.detail.get("window")
    conditions = conditions_for(config, model=model, window=window, max_tokens=max_tokens)
    if isinstance(served, int):
        conditions = replace(conditions, facts=replace(conditions.facts, window=served))
    run = _ReplayRun(
        file=file,
        prices=priced(stated, conditions),
        policies=tuple(policy_named(name, config) for name in dict.fromkeys((policy, *compare))),
        conditions=conditions,
        advise=advise_too,
        keep_steps=steps or html is not None,
        drawn=MAX_DRAWN if html is not None and not steps else 0,
    )
    asyncio.run(_play(run, limit, one))
    if html is not None:
        _write(html, run)
    return Findings(lambda: _report(run, steps=steps), lambda: _print(run, steps=steps, html=html))


async def _kept(store: Store, name: str) -> tuple[Recording, ExchangeRow]:
    """What is stored of a conversation word for word (what its longest summary stands for), and its last request."""
    recordings = [recording for _, recording in await summarized(store, name)]
    if not recordings:
        raise Failure(
            f"nothing of {name} was summarised yet, so no message of it is stored; weir replay FILE plays a file"
        )
    (last,) = await store.timeline(await found(store, name), limit=1)
    return max(recordings, key=lambda each: len(each.raws)), last


async def summarized(store: Store, name: str) -> list[tuple[Cut, Recording]]:
    """The summaries of a conversation, each with what it stands for, word for word."""
    row = await found(store, name)
    cuts = {each.cut.ref: each.cut for each in await checkpoints_of(store, row) if each.cut is not None}
    whole: list[tuple[Cut, Recording]] = []
    for ref, cut in cuts.items():
        values = [read_value(each.body) for each in await store.covered(row.tenant, ref)]
        messages = [value for value in values if isinstance(value, Mapping)]
        if messages:
            whole.append((cut, recording_of(messages, name=row.name)))
    return whole


async def _play(run: _ReplayRun, limit: int | None, one: Recording | None) -> None:
    async with store_in_memory() as store:
        if one is not None:
            await run.play(Place(one, 0), store)
            return
        with progress("conversations") as progressed:
            for place in recorded(run.file, limit, progressed):
                await run.play(place, store)


def conditions_for(
    config: Config, *, model: str | None, window: int | None, max_tokens: int | None = None
) -> Conditions:
    tokenizer = Tokenizer()
    click.get_current_context().call_on_close(tokenizer.close)
    models = ModelRegistry(config.models)
    return Conditions.of(model or "", tokenizer, models, window=window or config.window, max_tokens=max_tokens)


def recorded(file: Path, limit: int | None, progressed: Progressed) -> Iterator[Place]:
    """The conversations of a file; one that cannot be read is wrong usage, exit 2."""
    try:
        size = file.stat().st_size
        for number, place in enumerate(islice(read_recordings(file), limit), start=1):
            yield place
            share = place.read / max(1, size)
            progressed(place.read, size, f"{counted(number, 'conversation')}, {share:.0%} of the file")
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror or error}") from None
    except BadRecording as fault:
        raise click.UsageError(str(fault)) from None


def priced(stated: str | None, conditions: Conditions) -> PriceList:
    try:
        return price_list(stated, model=conditions.model, facts=conditions.facts)
    except BadPrices as fault:
        raise click.BadParameter(str(fault), param_hint="--prices") from None


def policy_named(name: str, effective: Config) -> ContextSettings:
    """The policy of that name, or of a file's, called by what was typed."""
    place, colon, own = name.rpartition(":")
    config = loaded(Path(place)) if colon else effective
    return replace(config.policy(known_policy(own, config)), name=name)


def _length(replayed: Replayed) -> int:
    return replayed.scenarios[0].tally.requests


def _write(html: Path, run: _ReplayRun) -> None:
    budget = run.conditions.budget(run.policies[0])
    drawn = sorted(run.kept, key=_length, reverse=True)[:MAX_DRAWN]
    page = render_report(
        ReplayReport(
            title=run.file.name,
            window=budget.window,
            reserve=budget.reserve,
            prices=run.prices,
            totals=run.totals,
            drawn=sorted(drawn, key=lambda replayed: replayed.line),
        )
    )
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{html}: {error.strerror or error}") from error


def _report(run: _ReplayRun, *, steps: bool) -> dict[str, object]:
    budget, choice = run.conditions.budget(run.policies[0]), recommend(run.traffic.traffic)
    report: dict[str, object] = {
        "file": str(run.file),
        "model": run.conditions.model or None,
        "window": budget.window,
        "reserve": budget.reserve,
        "prices": {"source": run.prices.source, "unit": "$" if run.prices.dollars else "input tokens"},
        "policies": {name: tally.values() for name, tally in run.totals.items()},
        "conversations": run.each,
        "recommendation": {
            "kind": choice.kind,
            "policies": list(choice.policies),
            "reason": choice.reason,
            "worst_tools": worst_json(worst_tools(run.traffic.traffic), "tokens"),
        },
    }
    if run.advice is not None:
        shape = run.advice.shape
        report["advice"] = {"trigger": shape.trigger, "low_water": shape.low_water, "reason": run.advice.reason}
    if steps:
        report["steps"] = [
            {"id": kept.id, "policy": scenario.name, "steps": [step.values() for step in scenario.steps]}
            for kept in run.kept
            for scenario in kept.scenarios
        ]
    return report


def _print(run: _ReplayRun, *, steps: bool, html: Path | None) -> None:
    budget, first = run.conditions.budget(run.policies[0]), run.totals[UNMANAGED]
    played = f"{counted(first.conversations, 'conversation')}, {counted(first.requests, 'request')}"
    room = f"a window of {budget.window:,} tokens ({budget.reserve:,} for the answer)"
    print_line(f"{played}, {room}, {run.prices.source}")
    for kept in run.kept if steps else ():
        for scenario in kept.scenarios:
            if scenario.name not in (UNMANAGED, SLIDING):
                print_line(f"\n{kept.id}: {scenario.name}")
                print_table(STEP_TITLES, [_step_cells(step, run.prices) for step in scenario.steps], numbers=0)
    click.echo()
    print_table(COLUMNS, [table_row(name, tally, run.prices) for name, tally in run.totals.items()], numbers=1)
    for text in _remarks(run):
        print_line(text)
    if html is not None:
        print_line(f"The report is in {html}.")


def _remarks(run: _ReplayRun) -> Iterator[str]:
    for name, tally in run.totals.items():
        yield from remarks(name, tally)
    choice = recommend(run.traffic.traffic)
    yield f"Traffic: {choice.kind} ({choice.reason}). Try {', then '.join(choice.policies)}."
    for each in worst_tools(run.traffic.traffic, most=1):
        yield f"{each.share:.0%} of the tool results' tokens are from {each.tool.name}, which {each.advice}."
    if run.advice is not None:
        yield f"Advised trigger {run.advice.shape.trigger:.2f} of U. {run.advice.reason}"


def _step_cells(step: Step, prices: PriceList) -> tuple[object, ...]:
    return (
        step.number,
        step.messages,
        f"{step.before:,}",
        f"{step.after:,}",
        f"{step.limit:,}",
        _happened(step),
        f"{step.reuse:.1%}",
        prices.shown(step.cost),
        f"{step.ratio:.2f}" if step.fits else "–",  # noqa: RUF001 - a dash
    )


def _happened(step: Step) -> str:
    if step.why is not None:
        return f"refused: {step.why.text}"
    done = ",".join(f"{name}={count}" for name, count in step.applied.items()) or "none"
    return f"{step.action if step.action in ('refused', 'failed') else done}{' *' if step.broke else ''}"
