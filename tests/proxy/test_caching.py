"""What the provider's cache made of a request: golden numbers, boundaries, and whose doing a new prefix is."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from policies.ledger import Action, Decision, Edit, EditKind, Trend, WindowPressure
from policies.limits import TokenBudget, limits_for
from policies.settings import ContextSettings
from proxy.conversation.thread import Thread, View
from proxy.features.cache_use import CacheUse, cache_use_of
from proxy.models.facts import ModelFacts, prices_of
from proxy.models.limits import ModelLimits
from proxy.planning.values import Plan, Recognized
from proxy.store.records import Branch, EvictionRow
from proxy.tap import ReportedUsage, read_completion
from proxy.wire.codec import parse_chat
from proxy.wire.transcripts import Transcripts
from tests.functional.harness import COUNTER

FACTS = ModelFacts(window=100_000, input_price=3e-6, output_price=15e-6, cache_write_price=3.75e-6)
TTL = 300.0


def usage_of(usage: dict[str, Any]) -> ReportedUsage | None:
    return read_completion(json.dumps({"choices": [], "usage": usage}).encode()).usage


@pytest.mark.requirement("A4.14")
@pytest.mark.parametrize(
    ("usage", "cached", "written"),
    [
        ({"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 896}}, 896, None),
        ({"prompt_tokens": 1000, "prompt_cache_hit_tokens": 640, "prompt_cache_miss_tokens": 360}, 640, None),
        ({"prompt_tokens": 1000, "prompt_tokens_details": {}, "prompt_cache_hit_tokens": 640}, 640, None),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 7}}, 0, 7),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}, "cache_creation_input_tokens": 8},
            1,
            8,
        ),
        ({"prompt_tokens": 1000, "prompt_tokens_details": None}, None, None),
        ({"prompt_tokens": 1000}, None, None),
    ],
)
def test_cached_tokens_are_read_in_every_spelling(
    usage: dict[str, Any], cached: int | None, written: int | None
) -> None:
    found = usage_of(usage)
    assert found is not None
    assert (found.cached, found.written) == (cached, written)


@pytest.mark.requirement("A4.14")
def test_a_cached_token_costs_a_tenth_where_the_model_has_no_price_for_it() -> None:
    prices = prices_of("m", FACTS)
    assert prices is not None
    assert prices.cache_read == pytest.approx(0.1 * 3e-6)
    dearer = prices_of("m", replace(FACTS, cache_read_price=1.5e-6))
    assert dearer is not None
    assert dearer.cache_read == 1.5e-6
    assert prices_of("m", ModelFacts(window=100_000)) is None


ROLES = ("system", "user", "assistant", "user", "assistant", "user", "assistant", "user")


def message(place: int, number: int) -> dict[str, Any]:
    return {"role": ROLES[place], "content": f"message {number}"}


class Talk:
    """One conversation, settled request after request as the exchange would."""

    def __init__(self) -> None:
        branch = Branch(tenant="t", conversation="c", name="c", branch="b", version=0)
        self.thread = Thread(branch)
        self.view = View(10_000)
        self.at = 1000.0
        self.sent = 0

    def request(
        self,
        numbers: Sequence[int],
        *,
        after: float = 1.0,
        known: int | None = None,
        tools: Sequence[int] = (1,),
        usage: ReportedUsage | None = None,
        removed: tuple[int, ...] = (),
        saved: int = 0,
        pruned: tuple[str, ...] = (),
        rows: tuple[EvictionRow, ...] = (),
        observed: bool = False,
        ok: bool = True,
    ) -> CacheUse:
        """One request of these messages, ``after`` so many seconds; of the chain ``known`` were sent before."""
        body = {"model": "m", "tools": tools, "messages": [message(i, n) for i, n in enumerate(numbers)]}
        request = parse_chat(json.dumps(body).encode())
        reading = asyncio.run(Transcripts().read(request, tenant="t", model="m", counter=COUNTER))
        before = self.at if self.sent else None
        self.at += after
        edit = Edit(b"", 0, EditKind.EVICT, "gone", "r", 1)
        budget = TokenBudget(window=10_000, reserve=1000, headroom=0)
        recognized = Recognized(
            transcript=reading.transcript,
            thread=self.thread,
            view=self.view,
            length=self.sent if known is None else known,
            limits=ModelLimits(budget, FACTS, "s", "s", budget.window),
            policy_limits=limits_for(ContextSettings(), budget),
            trend=Trend(at=before),
        )
        plan = Plan(
            body=b"",
            recognized=recognized,
            decision=Decision(
                action=Action.EDIT if removed else Action.PASS,
                pieces=None,
                before=1000 + saved,
                due=1000,
                after=1000,
                limit=9000,
                raw_after=1000,
                pressure=WindowPressure(level=0.1, zone="green", status="healthy"),
                buckets={},
                applied={},
                edits=(edit,) * len(removed),
                removed=removed,
                pruned=pruned,
                trend=Trend(at=self.at),
            ),
            evictions=rows,
        )
        self.sent, billed = len(reading.transcript.chain), () if usage is None else (usage,)
        return cache_use_of(plan, recognized, request, billed, ttl=TTL, at=self.at, carried_out=not observed, ok=ok)


@pytest.mark.requirement("A0.2", "A4.14")
def test_what_was_saved_is_what_the_clients_array_would_have_cost_at_the_same_share_of_hits() -> None:
    use = Talk().request([1, 2], usage=ReportedUsage(prompt=10_000, cached=8_000, completion=100), saved=40_000)
    assert use.cost_saved == pytest.approx(40_000 * (0.2 * 3e-6 + 0.8 * 0.3e-6))
    uncached = Talk().request([1, 2], usage=ReportedUsage(prompt=10_000, completion=100), saved=40_000)
    assert uncached.cost_saved == pytest.approx(40_000 * 3e-6)
    observed = Talk().request([1, 2], usage=ReportedUsage(prompt=10_000, completion=100), saved=40_000, observed=True)
    assert observed.cost_saved == 0


@pytest.mark.requirement("A0.2", "A4.14")
def test_a_batch_that_makes_the_cache_forget_costs_more_than_it_saves_at_once() -> None:
    talk = Talk()
    talk.request([1, 2, 3, 4], usage=ReportedUsage(prompt=10_000, cached=9_000, completion=0))
    batch = talk.request(
        [1, 2, 3, 4, 5], usage=ReportedUsage(prompt=5_000, cached=500, completion=0), saved=6_000, removed=(2,)
    )
    assert batch.prefix_changed == "proxy"
    assert batch.cost == pytest.approx(4_500 * 3e-6 + 500 * 0.3e-6)
    unmanaged = 11_000 * (0.1 * 3e-6 + 0.9 * 0.3e-6)
    assert batch.cost_saved == pytest.approx(unmanaged - (batch.cost or 0))
    assert (batch.cost_saved or 0) < 0
