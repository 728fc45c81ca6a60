"""How far the management of a request went, in words and figures."""

from dataclasses import asdict

from policies import ContextSettings, Decision
from policies.summary import PROMPTS

MAX_CONDENSED = 40
MAX_LAYERS = 32


def figures_of(decision: Decision, settings: ContextSettings, *, base: int) -> dict[str, object]:
    """What the audit says of a batch: the decision record (requirement A0.148), and what was condensed.

    ``base`` is the denominator of the pressure, tokens.
    """
    figures: dict[str, object] = {
        "policy": settings.name,
        "action": stage_of(decision, settings, base=base),
        "utilization_before": round(decision.before / base, 4),
        "utilization_after": round(decision.after / base, 4),
        "compression_strategy": strategy_of(decision),
        "new_window_id": decision.window_id,
    }
    condensed = condensed_in(decision)
    return figures | {"condensed": condensed} if condensed else figures


def condensed_in(decision: Decision) -> list[dict[str, object]]:
    """What a decision put in shorter words, for the audit: tokens, ratio, questions, prompt with its digest."""
    found: list[dict[str, object]] = []
    for report in decision.trail:
        for each in report.condensed[: MAX_CONDENSED - len(found)]:
            digest = next((p.digest for p in PROMPTS.values() if p.purpose == each.purpose), None)
            row = {**asdict(each), "ratio": round(each.ratio, 2), "kept": report.kept}
            found.append(row if digest is None else row | {"prompt_digest": digest})
    return found


def layers_in(decision: Decision) -> list[dict[str, object]]:
    """What each layer that ran did to a request: its scope, tokens before and after, units, and why it did no more.

    ``kept`` is whether its work is in the request, ``rung`` whether it helped only after all others had not; tokens
    are uncalibrated.
    """
    return [
        {
            "layer": report.layer,
            "scope": report.scope,
            "tokens_before": report.before,
            "tokens_after": report.after,
            "units": report.units,
            "kept": report.kept,
            "rung": report.rung,
            "reason": report.reason or None,
            "ref": report.ref,
        }
        for report in decision.trail[:MAX_LAYERS]
    ]


def stage_of(decision: Decision, settings: ContextSettings, *, base: int) -> str:
    """How far the management of a request had to go, in a word (requirement A0.148).

    ``none`` while there is room, ``evaluate`` from yellow on and at a spike, ``evict_and_compress`` for a new batch,
    ``emergency_compaction`` if that was a summary from red on or one of the last rungs, ``cross_window_save`` if the
    conversation went on in a new window. ``base`` is the denominator of the pressure, tokens.
    """
    kept = [report for report in decision.trail if report.kept]
    if any(report.layer == "rollover" for report in kept):
        return "cross_window_save"
    if decision.is_new:
        late = decision.cut is not None and decision.before >= settings.zones.red_at * base
        rung = decision.pressure.status == "emergency" or any(report.rung for report in kept)
        return "emergency_compaction" if late or rung else "evict_and_compress"
    spiked = decision.reading is not None and decision.reading.spike
    return "none" if decision.pressure.zone == "green" and not spiked else "evaluate"


def strategy_of(decision: Decision) -> str:
    """The layers whose work on this request was kept, in order and joined by ``+``; empty if there was none."""
    return "+".join(dict.fromkeys(report.layer for report in decision.trail if report.kept))
