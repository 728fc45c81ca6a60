"""The row of an exchange: what its timeline, the audit and the commands show of it later."""

from dataclasses import asdict

from policies import Decision
from policies.turns import results_by_tool
from proxy.effects.evictions import condensed_in, layers_in, stage_of, strategy_of
from proxy.outcome import TokenUsage, evicted_count
from proxy.record import ExchangeRecord
from proxy.store.records import ExchangeRow

MAX_EVENTS = 8


def row_of(record: ExchangeRecord, tokens: TokenUsage) -> ExchangeRow:
    """The row of a request that was recognised and counted; of an observed one it says what would have been done."""
    planned, settings, decision = record.planned, record.settings, record.planned.decision
    assert planned.recognised is not None  # noqa: S101 - the caller looked at its branch
    assert planned.reading is not None  # noqa: S101 - whoever was recognised was read
    assert planned.belief is not None  # noqa: S101 - it was counted
    thread, chain = planned.recognised.thread, planned.reading.transcript.chain
    ends = [(end, len(chain)) for end in thread.ends(planned.reading.transcript)]
    usage, pressure = record.seen.usage, decision.pressure if decision is not None else tokens.pressure
    base = max(1, planned.belief.budget.base(settings))
    reading = decision.reading if decision is not None else None
    return ExchangeRow(
        id=record.id,
        tenant=thread.branch.tenant,
        conversation=thread.branch.conversation,
        name=thread.branch.name,
        branch=thread.branch.branch,
        parent=thread.parent,
        at=record.at,
        model=record.model,
        policy=settings.name,
        chain_end=chain[-1] if chain else b"",
        length=len(chain),
        ends=(*ends, *((end, len(chain) + 1) for end in record.answers)),
        status=record.status or 0,
        outcome=record.label,
        tokens_before=tokens.before,
        tokens_after=decision.after if decision is not None else tokens.after,
        limit=tokens.limit,
        pressure=pressure.level,
        zone=pressure.zone,
        actions=record.decided if record.observed else record.actions,
        usage_prompt=usage.prompt if usage else None,
        usage_completion=usage.completion if usage else None,
        usage_cached=usage.cached if usage else None,
        overhead_ms=record.overhead_ms,
        duration_ms=1000 * record.duration,
        attempts=1 + record.retries,
        action="none" if decision is None else stage_of(decision, settings, base=base),
        observed=record.observed,
        evicted=evicted_count(planned),
        strategy="" if decision is None else strategy_of(decision),
        pressure_before=tokens.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend if decision is not None else None,
        parent_conversation=record.job.parent if record.job is not None else None,
        asked_again=planned.asked_again,
        detail=_detail(record),
        health=record.checkup,
        events=record.events,
        refusal={"code": planned.refused} if planned.refused is not None else record.refusal,
    )


def _detail(record: ExchangeRecord) -> dict[str, object]:
    """What the timeline tells beside the columns: buckets, base, events, layers, tools, cache, summarizer, recalls."""
    planned, decision, detail = record.planned, record.planned.decision, dict[str, object]()
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
    if planned.belief is not None:
        budget = planned.belief.budget
        detail["base"] = budget.base(record.settings)
        if budget.caps:
            detail["caps"] = dict(budget.caps)
        detail["source"] = "model_reported" if budget.reported else "client_estimated"
    if record.events:
        detail["events"] = [{"kind": e.kind, **e.facts} for e in record.events[:MAX_EVENTS]]
    if record.ending is not None:
        detail["ending"] = record.ending
    if decision is not None and decision.pruned:
        detail["pruned"] = list(decision.pruned)
    if decision is not None and decision.trail:
        detail |= _done(decision)
    if planned.reading is not None and planned.recognised is not None:
        transcript = planned.reading.transcript
        if tools := results_by_tool(transcript, transcript.head + planned.recognised.length):
            detail["tools"] = tools
    if record.cache is not None:
        detail |= record.cache.facts()
    if record.spent.any:
        detail["summarizer"] = asdict(record.spent)
    if record.recalls:
        detail["recall"] = [asdict(each) for each in record.recalls]
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
