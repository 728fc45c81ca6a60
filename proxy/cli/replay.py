"""``weir replay``: recorded conversations played through policies, without a model and without a
network.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import click

from policies.quality.prices import PROVIDERS
from policies.settings import ContextSettings
from proxy.cli.output import Progressed, print_line, print_table, progress
from proxy.cli.shared import FILE, POSITIVE, Findings, configured, counted, known_policy, loaded
from proxy.config.values import Config
from proxy.features.replay.play import UNMANAGED, Tally
from proxy.features.replay.play import replay as play
from proxy.features.replay.scenarios import Conditions, store_in_memory
from proxy.features.replay.script import BadRecording, Place, Script, read_recordings
from proxy.models.facts import BadPrices, ModelFacts, ModelRegistry, PriceList, price_list
from proxy.wire.counting import Tokenizer

DEFAULT_ENCODING = "o200k_base"
COLUMNS = (
    "policy",
    "requests",
    "fit",
    "refused",
    "batches",
    "largest",
    "prefix reuse",
    "tokens sent",
    "tokens saved",
    "cost",
    "vs unmanaged",
    "facts in window",
    "or archive",
)


@click.command()
@click.argument("file", type=FILE)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("balanced",),
    help="Its name, or FILE.yaml:NAME; repeat.",
)
@click.option(
    "--window",
    type=click.IntRange(min=256),
    help="Tokens; defaults to the policy's, or the model's.",
)
@click.option("--model", help="The model, for its tokenizer, window and prices.")
@click.option(
    "--max-tokens",
    type=POSITIVE,
    help="The max_tokens of each request; defaults to the policy's reserve.",
)
@click.option("--limit", type=POSITIVE, help="Only the first so many conversations.")
@click.option(
    "--prices",
    "stated",
    help=f"One of {', '.join(PROVIDERS)}, or input,read,write,output in $ a million.",
)
@configured
def replay(
    config: Config,
    *,
    file: Path,
    policies: tuple[str, ...],
    window: int | None,
    model: str | None,
    max_tokens: int | None,
    limit: int | None,
    stated: str | None,
) -> Findings:
    """Play recorded conversations through policies: tokens, batches, refusals, prefix reuse, cost.
    A dry run.

    FILE has one conversation per line, {"messages": […]}, optionally with "tools" and "meta". Each
    assistant message is one request. No model is called and nothing is sent anywhere.

    \b
    Example:
      weir replay sessions.jsonl --policy balanced --policy article-128k --window 8192
      weir replay sessions.jsonl --policy weir.yaml:support
    """
    conditions = conditions_for(config, model=model, window=window, max_tokens=max_tokens)
    settings = [policy_named(name, config) for name in dict.fromkeys(policies)]
    try:
        prices = price_list(stated, model=conditions.model, facts=conditions.facts)
    except BadPrices as fault:
        raise click.BadParameter(str(fault), param_hint="--prices") from None
    totals = asyncio.run(_play(file, settings, conditions, prices, limit))
    budget = conditions.budget(settings[0])

    def value() -> dict[str, object]:
        return {
            "file": str(file),
            "model": conditions.model or None,
            "window": budget.window,
            "reserve": budget.reserve,
            "prices": {"source": prices.source, "unit": "$" if prices.dollars else "input tokens"},
            "policies": {name: tally.values() for name, tally in totals.items()},
        }

    def show() -> None:
        first = totals[UNMANAGED]
        played = (
            f"{counted(first.conversations, 'conversation')}, {counted(first.requests, 'request')}"
        )
        room = f"a window of {budget.window:,} tokens ({budget.reserve:,} for the answer)"
        print_line(f"{played}, {room}, {prices.source}\n")
        print_table(
            COLUMNS, [_row(name, tally, prices) for name, tally in totals.items()], numbers=1
        )
        for name, tally in totals.items():
            for remark in _remarks(tally):
                print_line(f"{name}: {remark}")

    return Findings(value, show)


async def _play(
    file: Path,
    policies: list[ContextSettings],
    conditions: Conditions,
    prices: PriceList,
    limit: int | None,
) -> Mapping[str, Tally]:
    totals: dict[str, Tally] = {}
    async with store_in_memory() as store:
        with progress("conversations") as progressed:
            for place in recorded(file, limit, progressed):
                script = Script(place.recording, counter=conditions.counter, model=conditions.model)
                for name, tally in (
                    await play(script, policies, conditions, prices.prices, store)
                ).items():
                    totals.setdefault(name, Tally()).add(tally)
    return totals


def conditions_for(
    config: Config, *, model: str | None, window: int | None, max_tokens: int | None = None
) -> Conditions:
    tokenizer = Tokenizer()
    click.get_current_context().call_on_close(tokenizer.close)
    facts = (
        ModelRegistry(config.models).facts(model, settings=ContextSettings())
        if model
        else ModelFacts()
    )
    counter = tokenizer.counter(model or DEFAULT_ENCODING)
    return Conditions(
        counter=counter,
        model=model or "",
        facts=facts,
        window=window or config.window,
        max_tokens=max_tokens,
    )


def recorded(file: Path, limit: int | None, progressed: Progressed) -> Iterator[Place]:
    """The conversations of a file; one that cannot be read is wrong usage, exit 2."""
    try:
        size = file.stat().st_size
        for number, place in enumerate(islice(read_recordings(file), limit), start=1):
            yield place
            share = place.read / max(1, size)
            progressed(
                place.read, size, f"{counted(number, 'conversation')}, {share:.0%} of the file"
            )
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror or error}") from None
    except BadRecording as fault:
        raise click.UsageError(str(fault)) from None


def policy_named(name: str, effective: Config) -> ContextSettings:
    """The policy of that name, or of a file's, called by what was typed."""
    place, colon, own = name.rpartition(":")
    config = loaded(Path(place)) if colon else effective
    return replace(config.policy(known_policy(own, config)), name=name)


def _row(name: str, tally: Tally, prices: PriceList) -> tuple[str, ...]:
    kept = tally.retention
    counts = (tally.requests, tally.fit, tally.refused, tally.batches, tally.largest)
    compared = f"– ({tally.unanswered:,})" if tally.unanswered else f"{tally.ratio:.2f}"  # noqa: RUF001 - a dash
    return (
        name,
        *(f"{count:,}" for count in counts),
        f"{tally.reuse:.1%}",
        f"{tally.tokens:,}",
        f"{tally.saved:,}",
        prices.shown(tally.cost),
        compared,
        *(
            f"{part / kept.needed:.1%}" if kept.needed else "-"
            for part in (kept.kept, kept.recoverable)
        ),
    )


def _remarks(tally: Tally) -> Iterator[str]:
    of = f"of {tally.requests:,} requests"
    unfit = tally.unanswered - tally.refused
    if tally.refused:
        reasons = ", ".join(
            f"{bucket} {count:,} x" for bucket, count in tally.refused_by.most_common()
        )
        refused = f"{tally.refused:,} {of} would have been refused ({reasons})"
        yield f"{refused}: they are in no sum, and no ratio of costs is given."
    if unfit:
        yield f"{unfit:,} {of} do not fit the window: no ratio of costs is given."
    if tally.failed:
        yield f"{tally.failed:,} {of} could not be planned and went up as they came."
    if tally.asked:
        yield f"a model would have been asked {tally.asked:,} times; here code wrote every summary."
