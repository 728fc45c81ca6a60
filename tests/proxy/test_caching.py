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
from proxy.models.facts import ModelFacts, ModelRegistry, Probe, prices_of
from proxy.models.limits import LearnedLimits, ModelLimits, ModelLimitsResolver
from proxy.monitor import CacheUse, follow, hit_ratio, shown
from proxy.planning.values import CUT, Plan, Recognized
from proxy.store.records import Branch, EvictionRow
from proxy.tap import ReportedUsage, read_completion
from proxy.wire.chat import digest_of
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
@pytest.mark.parametrize(
    ("usage", "ratio"),
    [
        (ReportedUsage(prompt=1000, cached=896), 0.896),
        (ReportedUsage(prompt=1000, cached=0), 0.0),
        (ReportedUsage(prompt=1000, cached=1200), 1.0),
        (ReportedUsage(prompt=1000), None),
        (ReportedUsage(prompt=0, cached=0), None),
        (None, None),
    ],
)
def test_the_hit_ratio_is_cached_over_prompt_tokens(usage: ReportedUsage | None, ratio: float | None) -> None:
    assert hit_ratio(usage) == ratio


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
        return follow(plan, recognized, request, billed, ttl=TTL, at=self.at, carried_out=not observed, ok=ok)


@pytest.mark.requirement("A4.14")
@pytest.mark.parametrize(("gap", "cold"), [(1.0, False), (300.0, False), (300.5, True), (86_400.0, True)])
def test_a_request_is_cold_after_more_than_five_minutes(gap: float, cold: bool) -> None:
    talk = Talk()
    assert not talk.request([1, 2], after=0.0).cold
    assert talk.request([1, 2, 3, 4], after=gap).cold is cold


@pytest.mark.requirement("A4.14")
def test_the_cost_report_uses_a_tenth_for_what_was_cached() -> None:
    use = Talk().request([1, 2], usage=ReportedUsage(prompt=10_000, cached=8_000, completion=100))
    assert use.cost == pytest.approx(2_000 * 3e-6 + 8_000 * 0.3e-6 + 100 * 15e-6)
    assert use.cost_saved == 0
    written = ReportedUsage(prompt=10_000, cached=8_000, written=1_500, completion=0)
    assert Talk().request([1, 2], usage=written).cost == pytest.approx(500 * 3e-6 + 8_000 * 0.3e-6 + 1_500 * 3.75e-6)
    assert Talk().request([1, 2]).cost is None


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


@pytest.mark.requirement("A4.15")
def test_a_conversation_that_only_grows_changes_no_prefix() -> None:
    talk = Talk()
    uses = [talk.request(list(range(1, n))) for n in (3, 5, 7, 7, 9)]
    assert [use.prefix_changed for use in uses] == ["none"] * 5
    assert talk.request([1, 2, 3, 4], known=3).prefix_changed == "none", (
        "the beginning of what was sent is not another one"
    )


@pytest.mark.requirement("A4.15")
@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ([9, 2, 3, 4, 5], {}),
        ([1, 9, 3, 4, 5], {"known": 0}),
        ([1, 2, 3, 9, 5], {"known": 2}),
        ([1, 2, 9], {"known": 1}),
        ([1, 2, 3, 4, 5], {"tools": (1, 2)}),
        ([1, 2, 3, 4, 5], {"tools": ()}),
    ],
)
def test_what_the_client_does_to_system_tools_or_sent_messages_is_the_clients(
    numbers: list[int], options: dict[str, Any]
) -> None:
    talk = Talk()
    talk.request([1, 2, 3, 4])
    assert talk.request(numbers, **options).prefix_changed == "client"
    assert talk.request(numbers, tools=options.get("tools", (1,))).prefix_changed == "none"


@pytest.mark.requirement("A4.15")
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"removed": (3,)}, "proxy"),
        ({"removed": (4,)}, "none"),
        ({"removed": (3,), "observed": True}, "none"),
        ({"removed": (3,), "tools": (7,)}, "proxy"),
        ({"pruned": ("a",), "rows": "prune_tools"}, "proxy"),
        ({"pruned": ("a",)}, "client"),
        ({"rows": CUT}, "proxy"),
        ({"rows": "evict"}, "none"),
    ],
)
def test_a_batch_is_the_proxys_where_it_reaches_what_was_sent(options: dict[str, Any], changed: str) -> None:
    talk = Talk()
    talk.request([1, 2, 3, 4])
    if "rows" in options:
        digest = digest_of(message(4, 5))
        row = EvictionRow(
            digest=digest,
            occurrence=0,
            kind=options["rows"],
            layer="x",
            policy="p",
            tokens_before=9,
            tokens_after=1,
            tokens_remaining=9,
        )
        options = options | {"rows": (row,)}
    assert talk.request([1, 2, 3, 4, 5], **options).prefix_changed == changed


@pytest.mark.requirement("A4.15")
def test_a_first_request_has_no_prefix_that_could_change() -> None:
    assert Talk().request([1, 2, 3, 4], removed=(1, 2), known=0).prefix_changed == "none"


@pytest.mark.requirement("A4.15")
def test_a_batch_on_a_request_that_failed_is_told_with_the_one_that_gets_through() -> None:
    talk = Talk()
    talk.request([1, 2, 3, 4])
    assert talk.request([1, 2, 3, 4, 5], removed=(2,), ok=False).prefix_changed == "proxy"
    assert talk.request([1, 2, 3, 4, 5]).prefix_changed == "proxy"
    assert talk.request([1, 2, 3, 4, 5]).prefix_changed == "none"


@pytest.mark.requirement("A4.15")
def test_the_detail_of_a_row_says_only_what_there_is_to_say() -> None:
    assert CacheUse().facts() == {}
    assert shown({})["prefix_changed"] == "none"
    use = CacheUse(hit_ratio=0.123456, cold=True, prefix_changed="proxy", cost=0.01, cost_saved=-0.001)
    said = {"hit_ratio": 0.1235, "cold": True, "prefix_changed": "proxy", "cost": 0.01, "cost_saved": -0.001}
    assert use.facts() == shown(use.facts()) == said


def windows() -> ModelLimitsResolver:
    async def fetch(*asked: object) -> tuple[int, bytes]:
        raise AssertionError(asked)

    return ModelLimitsResolver(ModelRegistry(), LearnedLimits(()), Probe(), fetch)


@pytest.mark.requirement("A0.16")
@pytest.mark.parametrize(("reported", "drifts"), [(1150, False), (1151, True), (851, False), (849, True)])
def test_more_than_fifteen_percent_is_a_drift(reported: int, drifts: bool) -> None:
    learning = windows()
    learning.calibrate("s", estimated=1000, reported=reported)
    found = learning.take_drift("s")
    assert (found is not None) is drifts
    if found is not None:
        assert (found.predicted, found.reported) == (1000, reported)
        assert found.ratio == reported / 1000


@pytest.mark.requirement("A0.16")
def test_a_drift_is_told_once_until_the_estimate_was_right_again() -> None:
    learning = windows()
    told = []
    for reported in (1000, 1000, 1000, 1300, 1300, 1300, 1300, 1300, 900, 1300, 900):
        learning.calibrate("s", estimated=1000, reported=reported)
        told.append(learning.take_drift("s"))
    assert [found.reported if found else None for found in told] == [
        *(None, None, None, 1300, None, None, None, None, 900, None, 900),
    ]
    assert told[8] is not None
    assert told[8].predicted == 1300
    assert learning.take_drift("another") is None
