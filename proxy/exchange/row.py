"""The row of an exchange, and what is kept with it for inspection.

Each column of ``ExchangeRow`` is one line of ``row_of``.
"""

from collections.abc import Callable

import msgspec

from policies.ledger import Decision, TokenUsage, Trend
from policies.messages import results_by_tool
from policies.settings import Inspect
from proxy.effects.perform import NOTHING_SPENT
from proxy.exchange.exchange import evicted_count
from proxy.exchange.record import ExchangeRecord
from proxy.planning.values import Recognized, condensed_in, layers_in
from proxy.store.records import ExchangeRow, Inspection
from proxy.tap import NO_USAGE
from proxy.wire.codec import ClientRequest

MAX_EVENTS = 8


def row_of(
    record: ExchangeRecord,
    tokens: TokenUsage,
    recognized: Recognized,
    inspection: Inspection | None = None,
) -> ExchangeRow:
    exchange = record.exchange
    plan = record.exchange.plan
    decision = record.exchange.plan.decision
    thread = recognized.thread
    chain = recognized.transcript.chain
    branch = recognized.thread.branch
    plan_request = exchange.plan_request
    used = record.billed or NO_USAGE
    pressure = decision.pressure if decision is not None else tokens.pressure
    base = max(1, recognized.policy_limits.base)
    reading = decision.reading if decision is not None else None
    return ExchangeRow(
        id=exchange.id,
        tenant=branch.tenant,
        conversation=branch.conversation,
        name=branch.name,
        branch=branch.branch,
        parent=thread.parent,
        at=record.at,
        model=exchange.model,
        policy=record.policy.name,
        chain_end=chain[-1] if chain else b"",
        length=len(chain),
        floating=thread.floating,
        status=exchange.status or 0,
        outcome=record.label,
        tokens_before=tokens.before,
        tokens_after=decision.after if decision is not None else tokens.after,
        limit=tokens.limit,
        pressure=pressure.level,
        zone=pressure.zone,
        actions=exchange.actions(planned=True) if exchange.observed else record.actions,
        usage_prompt=used.prompt,
        usage_completion=used.completion,
        usage_cached=used.cached,
        usage_estimated=used.estimated,
        overhead_ms=exchange.overhead_ms,
        duration_ms=1000 * record.duration,
        attempts=1 + exchange.retries,
        action="none" if decision is None else decision.stage,
        observed=exchange.observed,
        evicted=evicted_count(plan) if plan.evictions else 0,
        strategy="" if decision is None or not decision.trail else decision.strategy,
        pressure_before=tokens.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend._replace(window=recognized.view.window)
        if decision is not None
        else None,
        parent_conversation=None if plan_request is None else plan_request.parent,
        detail=_detail(record, recognized) | {"status": pressure.status},
        health=record.checkup,
        events=record.events,
        refusal={"code": plan.refused} if plan.refused is not None else exchange.refusal,
        inspection=inspection,
        key="" if exchange.caller is None else exchange.caller.account,
        team="" if exchange.caller is None else exchange.caller.team,
        reserved=exchange.reserved,
    )


def _detail(record: ExchangeRecord, recognized: Recognized) -> dict[str, object]:
    exchange = record.exchange
    detail = dict[str, object]()
    decision = exchange.plan.decision
    budget = recognized.limits.budget
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
    detail["base"] = recognized.policy_limits.base
    detail["window"] = budget.window
    if budget.caps:
        detail["caps"] = dict(budget.caps)
        if decision is not None:
            detail["burn"] = burn_in(decision.trend, ratio=budget.ratio)
    if exchange.trace.recorded:
        detail["trace"] = exchange.trace.trace_id
    detail["source"] = "model_reported" if budget.reported else "client_estimated"
    if record.events:
        detail["events"] = [{"kind": e.kind, **e.facts} for e in record.events[:MAX_EVENTS]]
    if record.ending is not None:
        detail["ending"] = record.ending
    if record.checkup is not None and record.checkup.health.is_too_small:
        detail["too_small"] = True
    if decision is not None and decision.pruned:
        detail["pruned"] = list(decision.pruned)
    if decision is not None and decision.trail:
        detail |= _done(decision, budget.estimate)
    transcript = recognized.transcript
    if tools := results_by_tool(transcript, transcript.head + recognized.length):
        detail["tools"] = tools
    if record.cache is not None:
        detail |= record.cache.facts()
    if record.spent is not NOTHING_SPENT and record.spent.any:
        detail["summarizer"] = msgspec.structs.asdict(record.spent)
    if exchange.recalls:
        detail["recall"] = [msgspec.structs.asdict(each) for each in exchange.recalls]
    return detail


def burn_in(trend: Trend, *, ratio: float) -> dict[str, int]:
    """Tokens by which each bucket that grows does so with a request, as the upstream counts."""
    return {
        each.bucket: round(rate * ratio)
        for each in trend.burn
        if (rate := each.rate) is not None and rate > 0
    }


def _done(decision: Decision, estimate: Callable[[int], int]) -> dict[str, object]:
    done: dict[str, object] = {"layers": layers_in(decision, estimate)}
    if condensed := condensed_in(decision):
        done["condensed"] = condensed
    if decision.window_id is not None:
        done["window_id"] = decision.window_id
    if decision.cut is not None:
        done["summary_tokens"] = decision.cut.tokens
    return done


def inspection_of(
    recognized: Recognized, decision: Decision | None, request: ClientRequest | None, keep: Inspect
) -> Inspection:
    """The two arrays of a request; what was never given to the store before goes with them.

    ``decision`` is the one that was carried out, None where the request was sent as it came.
    """
    thread = recognized.thread
    transcript = recognized.transcript
    count = len(transcript.messages)
    raws = recognized.new
    known = thread.inspected
    if known < count - len(raws) and request is not None and request.messages is not None:
        raws = request.messages
    thread.inspected = count
    return Inspection(
        keep=keep.requests,
        messages=transcript.messages,
        pieces=None if decision is None else decision.pieces,
        raws=raws,
        first=count - len(raws) if raws is recognized.new else 0,
        pruned=() if decision is None else decision.pruned,
        tools=transcript.tools,
    )
