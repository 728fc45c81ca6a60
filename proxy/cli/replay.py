"""``weir replay``: recorded conversations played through policies, without a model and without a network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import click
from rich.table import Table

from policies import ContextSettings
from policies.advise import PROVIDERS, Advice, recommend, worst_tools
from proxy.cli import Failure
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.progress import progress
from proxy.config import Config
from proxy.config.file import nearest
from proxy.models import ModelFacts, ModelRegistry
from proxy.prices import BadPrices, PriceList, price_list
from proxy.rehearsal import (
    SLIDING,
    UNMANAGED,
    BadRecording,
    Conditions,
    Place,
    Rehearsal,
    Script,
    Step,
    Tally,
    read_recordings,
    rehearse,
    step_values,
)
from proxy.rehearsal.traffic import TrafficCount, advice_for, advised
from proxy.rehearsal_report import COLUMNS, Report, remarks, render_report, table_row
from proxy.tokenizer import Tokenizer

DEFAULT_ENCODING = "o200k_base"
DRAWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be played, under which conditions, and what of it is kept."""

    file: Path
    policies: tuple[ContextSettings, ...]
    conditions: Conditions
    prices: PriceList
    limit: int | None
    advise: bool
    keep_steps: bool
    drawn: int


@dataclass(slots=True)
class Outcome:
    """Sums by lane, the conversations that were kept with their steps, and the first conversation's advice."""

    totals: dict[str, Tally]
    kept: list[Rehearsal]
    each: list[dict[str, object]]
    traffic: TrafficCount
    advice: Advice | None = None


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--policy", default="balanced", show_default=True, help="A policy's name, or FILE.yaml:NAME.")
@click.option("--compare", multiple=True, metavar="POLICY", help="Another one beside it; may be repeated.")
@click.option("--window", type=click.IntRange(min=256), help="The model's window, tokens; else the model's.")
@click.option("--model", default="", help="Its tokenizer, window and prices.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="What each request asks for; else the policy's reserve.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many conversations, from the beginning.")
@click.option("--prices", "stated", help=f"One of {', '.join(PROVIDERS)}, or input,read,write,output in $ a million.")
@click.option("--advise", "advise_too", is_flag=True, help="Also play each policy with the trigger that costs least.")
@click.option("--steps", is_flag=True, help="A row for each request too.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT", help="Write a report with plots."
)
@config_option
@json_option
def replay(
    file: Path,
    *,
    policy: str,
    compare: tuple[str, ...],
    window: int | None,
    model: str,
    max_tokens: int | None,
    limit: int | None,
    stated: str | None,
    advise_too: bool,
    steps: bool,
    html: Path | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Play recorded conversations through policies: tokens, actions, prefix reuse, cost, facts. A dry run.

    FILE has a conversation a line, {"messages": […]}, with "tools" and "meta" if there are any. Each message of the
    assistant is one request. No model is asked and nothing is sent anywhere.

    \b
    Example:
      weir replay sessions.jsonl --policy balanced --window 8192
      weir replay sessions.jsonl --compare off --compare weir.yaml:support --model gpt-5 --html report.html
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {html.parent}", param_hint="--html")
    effective = loaded(path)
    names = tuple(dict.fromkeys((policy, *compare)))
    facts = ModelRegistry(effective.models).facts(model, settings=ContextSettings()) if model else ModelFacts()
    tokenizer = Tokenizer()
    try:
        prices = price_list(stated, model=model, facts=facts)
    except BadPrices as fault:
        raise click.BadParameter(str(fault), param_hint="--prices") from None
    task = Task(
        file=file,
        policies=tuple(policy_named(name, effective) for name in names),
        conditions=Conditions(
            counter=tokenizer.counter(model or DEFAULT_ENCODING),
            model=model,
            facts=facts,
            window=window or effective.window,
            max_tokens=max_tokens,
        ),
        prices=prices,
        limit=limit,
        advise=advise_too,
        keep_steps=steps or html is not None,
        drawn=DRAWN if html is not None and not steps else 0,
    )
    outcome = _played(task)
    tokenizer.close()
    if html is not None:
        _write(html, task, outcome)
    if as_json:
        print_json(_report(task, outcome, steps=steps))
    else:
        _print(task, outcome, steps=steps, html=html)


def policy_named(name: str, effective: Config) -> ContextSettings:
    """The policy of that name, or of a file's, called by what was typed."""
    place, colon, own = name.rpartition(":")
    config = loaded(Path(place)) if colon else effective
    if own not in config.policies:
        raise click.BadParameter(f"no policy {own}{nearest(own, sorted(config.policies))}", param_hint="--policy")
    return replace(config.policy(own), name=name)


def _played(task: Task) -> Outcome:
    outcome = Outcome(totals={}, kept=[], each=[], traffic=TrafficCount())
    try:
        size = task.file.stat().st_size
    except OSError as error:
        _unreadable(f"{task.file}: {error.strerror or error}")
    with progress(size) as moved:
        try:
            for number, place in enumerate(read_recordings(task.file), start=1):
                _play(task, place, outcome)
                moved(place.read, number)
                if number == task.limit:
                    break
        except BadRecording as fault:
            _unreadable(str(fault))
    return outcome


def _unreadable(text: str) -> NoReturn:
    """A file that cannot be played is wrong usage: exit 2."""
    raise click.UsageError(text)


def _play(task: Task, place: Place, outcome: Outcome) -> None:
    conditions = task.conditions
    script = Script(place.recording, counter=conditions.counter, model=conditions.model)
    policies = list(task.policies)
    if task.advise:
        for settings in task.policies:
            advice = advice_for(script, settings, conditions, task.prices.prices)
            outcome.advice = outcome.advice or advice
            policies.append(advised(settings, advice))
    done = rehearse(script, policies, conditions, task.prices.prices, keep_steps=task.keep_steps)
    outcome.traffic.add(script)
    for lane in done.lanes:
        outcome.totals.setdefault(lane.name, Tally()).add(lane.tally)
    outcome.each.append(
        {"id": done.id, "line": done.line, "policies": {lane.name: lane.tally.values() for lane in done.lanes}}
    )
    if task.keep_steps:
        outcome.kept.append(done)
    if task.drawn and len(outcome.kept) > task.drawn:
        outcome.kept.remove(min(outcome.kept, key=lambda kept: kept.lanes[0].tally.requests))


def _write(html: Path, task: Task, outcome: Outcome) -> None:
    budget = task.conditions.budget(task.policies[0])
    drawn = sorted(outcome.kept, key=lambda kept: -kept.lanes[0].tally.requests)[:DRAWN]
    page = render_report(
        Report(
            title=task.file.name,
            window=budget.window,
            reserve=budget.reserve,
            prices=task.prices,
            totals=outcome.totals,
            drawn=sorted(drawn, key=lambda kept: kept.line),
        )
    )
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{html}: {error.strerror or error}") from error


def _report(task: Task, outcome: Outcome, *, steps: bool) -> dict[str, object]:
    budget = task.conditions.budget(task.policies[0])
    report: dict[str, object] = {
        "file": str(task.file),
        "model": task.conditions.model or None,
        "window": budget.window,
        "reserve": budget.reserve,
        "prices": {"source": task.prices.source, "unit": "$" if task.prices.dollars else "input tokens"},
        "policies": {name: tally.values() for name, tally in outcome.totals.items()},
        "conversations": outcome.each,
    }
    choice = recommend(outcome.traffic.traffic)
    report["recommendation"] = {
        "kind": choice.kind,
        "policies": list(choice.policies),
        "reason": choice.reason,
        "worst_tools": [
            {"tool": each.tool.name, "tokens": each.tool.tokens, "share": round(each.share, 4), "advice": each.advice}
            for each in worst_tools(outcome.traffic.traffic)
        ],
    }
    if outcome.advice is not None:
        advice = outcome.advice
        report["advice"] = {"trigger": advice.trigger, "low_water": advice.target, "reason": advice.reason}
    if steps:
        report["steps"] = [
            {"id": kept.id, "policy": lane.name, "steps": [step_values(step) for step in lane.steps]}
            for kept in outcome.kept
            for lane in kept.lanes
        ]
    return report


def _print(task: Task, outcome: Outcome, *, steps: bool, html: Path | None) -> None:
    out = console()
    budget = task.conditions.budget(task.policies[0])
    first = outcome.totals[UNMANAGED]
    played = f"{_count(first.conversations, 'conversation')}, {_count(first.requests, 'request')}"
    room = f"a window of {budget.window:,} tokens ({budget.reserve:,} for the answer)"
    out.print(f"{played}, {room}, {task.prices.source}", soft_wrap=True, markup=False)
    if steps:
        for kept in outcome.kept:
            for lane in kept.lanes:
                if lane.name not in (UNMANAGED, SLIDING):
                    out.print(f"\n{kept.id}: {lane.name}", markup=False)
                    out.print(_steps_table(lane.steps, task.prices))
    out.print()
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in outcome.totals.items():
        table.add_row(*table_row(name, tally, task.prices))
    out.print(table)
    for text in _remarks(outcome):
        out.print(text, soft_wrap=True, markup=False)
    if html is not None:
        out.print(f"The report is in {html}.", soft_wrap=True, markup=False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _remarks(outcome: Outcome) -> Iterator[str]:
    for name, tally in outcome.totals.items():
        yield from remarks(name, tally)
    choice = recommend(outcome.traffic.traffic)
    yield f"This traffic is of the kind {choice.kind} ({choice.reason}). Try {', then '.join(choice.policies)}."
    for each in worst_tools(outcome.traffic.traffic, most=1):
        yield f"{each.share:.0%} of the tool results' tokens are from {each.tool.name}, which {each.advice}."
    if outcome.advice is not None:
        yield f"Advised trigger {outcome.advice.trigger:.2f} of U. {outcome.advice.reason}"


def _steps_table(steps: Sequence[Step], prices: PriceList) -> Table:
    names = ("request", "messages", "before", "after", "limit", "action", "reuse", "cost", "against unmanaged")
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for step in steps:
        done = ",".join(f"{name}={count}" for name, count in step.applied.items()) or "none"
        table.add_row(
            str(step.number),
            str(step.messages),
            f"{step.before:,}",
            f"{step.after:,}",
            f"{step.limit:,}",
            _happened(step, done),
            f"{step.reuse:.1%}",
            prices.shown(step.cost),
            f"{step.ratio:.2f}" if step.fits else "–",  # noqa: RUF001 - a dash
        )
    return table


def _happened(step: Step, done: str) -> str:
    """What was done to a request, or what refused it; a star where it did not begin with the one before."""
    if step.why is not None:
        return f"refused: {step.why.text}"
    return f"{step.action if step.action in ('refused', 'failed') else done}{' *' if step.broke else ''}"
