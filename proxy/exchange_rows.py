"""The row of an exchange: what its timeline, the audit and the commands show of it later."""

from collections.abc import Sequence
from dataclasses import asdict

from policies import ContextSettings, Decision
from policies.calls import results_by_tool
from policies.health import Checkup
from policies.pressure import Event
from proxy.caching import CacheUse
from proxy.outcome import Outcome, Sent, evicted_count
from proxy.planning import Planned
from proxy.stages import condensed_in, layers_in, stage_of, strategy_of
from proxy.store.records import ExchangeRow

MOST_EVENTS = 8


def row_of(
    outcome: Outcome,
    planned: Planned,
    sent: Sent,
    *,
    duration: float,
    at: float,
    checkup: Checkup | None,
    events: tuple[Event, ...],
    use: CacheUse | None,
    answers: Sequence[bytes] = (),
) -> ExchangeRow:
    """The row of an exchange that was recognised and counted, ended ``at`` (s since the epoch) after ``duration`` s.

    Of an observed request it says what would have been done. ``answers`` are the chain's hashes after each answer that
    tells the conversation from others.
    """
    assert planned.recognised is not None  # noqa: S101 - the caller looked at its branch
    assert planned.reading is not None  # noqa: S101 - whoever was recognised was read
    assert planned.belief is not None  # noqa: S101 - sent() looked
    thread, chain, decision = planned.recognised.thread, planned.reading.transcript.chain, planned.decision
    ends = thread.ends(planned.reading.transcript)
    usage = outcome.seen.usage if outcome.seen is not None else None
    settings, pressure = outcome.settings_or_default(), decision.pressure if decision is not None else sent.pressure
    base = max(1, planned.belief.budget.base(settings))
    reading = decision.reading if decision is not None else None
    return ExchangeRow(
        id=outcome.id,
        tenant=thread.branch.tenant,
        conversation=thread.branch.conversation,
        name=thread.branch.name,
        branch=thread.branch.branch,
        parent=thread.parent,
        at=at,
        model=outcome.request.model if outcome.request is not None else "",
        policy=settings.name,
        chain_end=chain[-1] if chain else b"",
        length=len(chain),
        ends=(*((end, len(chain)) for end in ends), *((end, len(chain) + 1) for end in answers)),
        status=outcome.status or 0,
        outcome=outcome.label,
        tokens_before=sent.before,
        tokens_after=decision.after if decision is not None else sent.after,
        limit=sent.limit,
        pressure=pressure.level,
        zone=pressure.zone,
        actions=outcome.actions(planned=outcome.observed),
        usage_prompt=usage.prompt if usage else None,
        usage_completion=usage.completion if usage else None,
        usage_cached=usage.cached if usage else None,
        overhead_ms=outcome.overhead_ms,
        duration_ms=1000 * duration,
        attempts=1 + outcome.retries,
        action="none" if decision is None else stage_of(decision, settings, base=base),
        observed=outcome.observed,
        evicted=evicted_count(planned),
        strategy="" if decision is None else strategy_of(decision),
        pressure_before=sent.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend if decision is not None else None,
        parent_conversation=outcome.job.parent if outcome.job is not None else None,
        asked_again=planned.asked_again,
        detail=_detail(outcome, planned, settings, events, use),
        health=checkup,
        events=events,
        refusal={"code": planned.refused} if planned.refused is not None else outcome.refusal,
    )


def _detail(
    outcome: Outcome, planned: Planned, settings: ContextSettings, events: Sequence[Event], use: CacheUse | None
) -> dict[str, object]:
    """What the timeline tells beside the columns: buckets, base, events, layers, tools, cache, summarizer, recalls."""
    decision, detail = planned.decision, dict[str, object]()
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
    if planned.belief is not None:
        budget = planned.belief.budget
        detail["base"] = budget.base(settings)
        if budget.caps:
            detail["caps"] = dict(budget.caps)
        detail["source"] = "model_reported" if budget.reported else "client_estimated"
    if events:
        detail["events"] = [{"kind": e.kind, **e.facts} for e in events[:MOST_EVENTS]]
    if outcome.ending is not None:
        detail["ending"] = outcome.ending
    if decision is not None and decision.pruned:
        detail["pruned"] = list(decision.pruned)
    if decision is not None and decision.trail:
        detail |= _done(decision)
    if planned.reading is not None and planned.recognised is not None:
        transcript = planned.reading.transcript
        if tools := results_by_tool(transcript, transcript.head + planned.recognised.length):
            detail["tools"] = tools
    if use is not None:
        detail |= use.facts()
    if outcome.spent is not None and (spent := outcome.spent()).any:
        detail["summarizer"] = asdict(spent)
    if outcome.recalls:
        detail["recall"] = [asdict(each) for each in outcome.recalls]
    return detail


def _done(decision: Decision) -> dict[str, object]:
    """What the layers that ran did, what was condensed, the new window and the tokens of a new summary."""
    done: dict[str, object] = {"layers": layers_in(decision)}
    if condensed := condensed_in(decision):
        done["condensed"] = condensed
    if decision.window_id is not None:
        done["window_id"] = decision.window_id
    if decision.cut is not None:
        done["summary_tokens"] = decision.cut.tokens
    return done
