"""``weir policy recommend``: what recorded traffic consists of, and which policy and trigger suit it."""

from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from policies import ContextSettings
from policies.advise import PROVIDERS, Advice, Traffic, advise, worst_tools
from policies.advise import recommend as choose
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.config.file import nearest
from proxy.models import ModelFacts, ModelRegistry
from proxy.prices import BadPrices, PriceList, price_list
from proxy.rehearsal import BadRecording, Conditions, Script, read_recordings
from proxy.rehearsal.traffic import TrafficCount, pace_of
from proxy.tokenizer import Tokenizer

DEFAULT_ENCODING = "o200k_base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Recorded conversations: what they consist of, tokens that a request adds, tokens that can never be removed."""

    traffic: Traffic
    growth: float
    fixed: int


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--policy", default="balanced", show_default=True, help="The policy whose trigger is to be advised on.")
@click.option("--window", type=click.IntRange(min=256), help="The model's window, tokens; else the model's.")
@click.option("--model", default="", help="Its tokenizer, window and prices.")
@click.option("--prices", "stated", help=f"One of {', '.join(PROVIDERS)}, or input,read,write,output in $ a million.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many conversations, from the beginning.")
@config_option
@json_option
def recommend(
    file: Path,
    *,
    policy: str,
    window: int | None,
    model: str,
    stated: str | None,
    limit: int | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Which way of evicting and which trigger suit recorded conversations, with the reasons.

    FILE has a conversation a line, {"messages": […]}. Nothing is sent anywhere and nothing is changed.

    \b
    Example:
      weir policy recommend sessions.jsonl --model gpt-5
    """
    effective = loaded(path)
    if policy not in effective.policies:
        raise click.BadParameter(
            f"no policy {policy}{nearest(policy, sorted(effective.policies))}", param_hint="--policy"
        )
    facts = ModelRegistry(effective.models).facts(model, settings=ContextSettings()) if model else ModelFacts()
    tokenizer = Tokenizer()
    try:
        prices = price_list(stated, model=model, facts=facts)
    except BadPrices as fault:
        raise click.BadParameter(str(fault), param_hint="--prices") from None
    conditions = Conditions(
        counter=tokenizer.counter(model or DEFAULT_ENCODING),
        model=model,
        facts=facts,
        window=window or effective.window,
    )
    try:
        measured = _measured(file, conditions, limit)
    except BadRecording as fault:
        raise click.UsageError(str(fault)) from None
    finally:
        tokenizer.close()
    settings = effective.policy(policy)
    budget = conditions.budget(settings)
    advice = advise(
        prices.prices,
        growth=measured.growth,
        fixed=measured.fixed,
        window=budget.window,
        usable=budget.usable,
        settings=settings,
    )
    report = _report(measured, advice, prices, policy=policy, window=budget.window, usable=budget.usable)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _measured(file: Path, conditions: Conditions, limit: int | None) -> Measured:
    """What the conversations of a file come to. Raises BadRecording."""
    count = TrafficCount()
    growth, fixed, requests = 0.0, 0, 0
    for number, place in enumerate(read_recordings(file), start=1):
        script = Script(place.recording, counter=conditions.counter, model=conditions.model)
        count.add(script)
        pace, weight = pace_of(script), max(1, len(script.requests))
        growth, fixed, requests = growth + pace.growth * weight, max(fixed, pace.fixed), requests + weight
        if number == limit:
            break
    return Measured(traffic=count.traffic, growth=growth / max(1, requests), fixed=fixed)


def _report(
    measured: Measured, advice: Advice, prices: PriceList, *, policy: str, window: int, usable: int
) -> dict[str, object]:
    traffic = measured.traffic
    choice = choose(traffic)
    return {
        "traffic": {
            "conversations": traffic.conversations,
            "requests": traffic.requests,
            "turns": traffic.turns,
            "tokens": traffic.tokens,
            "tool_results": round(traffic.results_share, 4),
            "repeated": round(traffic.repeated_share, 4),
            "growth": round(measured.growth, 1),
            "fixed": measured.fixed,
        },
        "recommendation": {"kind": choice.kind, "scorers": list(choice.policies), "reason": choice.reason},
        "advice": {
            "policy": policy,
            "window": window,
            "usable": usable,
            "prices": prices.source,
            "trigger": advice.trigger,
            "low_water": advice.target,
            "optimum": advice.optimum,
            "reason": advice.reason,
        },
        "worst_tools": [
            {"tool": each.tool.name, "tokens": each.tool.tokens, "share": round(each.share, 4), "advice": each.advice}
            for each in worst_tools(traffic)
        ],
    }


def _print(report: dict[str, object]) -> None:
    traffic, choice, advice, tools = (report[key] for key in ("traffic", "recommendation", "advice", "worst_tools"))
    if not (isinstance(traffic, dict) and isinstance(choice, dict) and isinstance(advice, dict)):
        return
    out = console()
    out.print(
        f"{traffic['conversations']:,} conversations, {traffic['requests']:,} requests, {traffic['tokens']:,} tokens, "
        f"{traffic['growth']:,.0f} more with each request",
        soft_wrap=True,
    )
    table = Table("advice", "value", "why", box=None, pad_edge=False)
    table.add_row("scorer", ", then ".join(choice["scorers"]), f"{choice['kind']}: {choice['reason']}")
    table.add_row("trigger", f"{advice['trigger']:.2f} of {advice['usable']:,}", str(advice["reason"]))
    table.add_row("low water", f"{advice['low_water']:.2f} of room", f"where a batch of {advice['policy']} should end")
    best = advice["optimum"]
    table.add_row("H*", "-" if best is None else f"{best:,}", f"the cheapest trigger by {advice['prices']} alone")
    for each in tools if isinstance(tools, list) else ():
        table.add_row(f"tool {each['tool']}", f"{each['share']:.0%} of results", str(each["advice"]))
    out.print(table)
