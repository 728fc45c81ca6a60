"""The row of an exchange: what its timeline, the audit and the commands show of it later."""

from dataclasses import asdict

from policies import Decision
from policies.turns import results_by_tool
from proxy.effects.evictions import condensed_in, layers_in, stage_of, strategy_of
from proxy.exchange.progress import TokenUsage, evicted_count
from proxy.exchange.record import ExchangeRecord
from proxy.planning import Recognized
from proxy.store.records import ExchangeRow

MAX_EVENTS = 8


def row_of(record: ExchangeRecord, tokens: TokenUsage, recognized: Recognized) -> ExchangeRow:
    """The row of a request that was recognised and counted; of an observed one it says what would have been done."""
    plan, settings, decision = record.plan, record.settings, record.plan.decision
    thread, chain = recognized.thread, recognized.transcript.chain
    ends = [(end, len(chain)) for end in thread.ends(recognized.transcript)]
    usage, pressure = record.seen.usage, decision.pressure if decision is not None else tokens.pressure
    base = max(1, recognized.limits.budget.base(settings))
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
        evicted=evicted_count(plan),
        strategy="" if decision is None else strategy_of(decision),
        pressure_before=tokens.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend if decision is not None else None,
        parent_conversation=record.asked.parent if record.asked is not None else None,
        asked_again=recognized.asked_again,
        detail=_detail(record, recognized),
        health=record.checkup,
        events=record.events,
        refusal={"code": plan.refused} if plan.refused is not None else record.refusal,
    )


def _detail(record: ExchangeRecord, recognized: Recognized) -> dict[str, object]:
    """What the timeline tells beside the columns: buckets, base, events, layers, tools, cache, summarizer, recalls."""
    decision, budget, detail = record.plan.decision, recognized.limits.budget, dict[str, object]()
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
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
    transcript = recognized.transcript
    if tools := results_by_tool(transcript, transcript.head + recognized.match.length):
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
