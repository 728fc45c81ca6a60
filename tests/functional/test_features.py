"""A feature hangs on the kernel by hooks, and costs no client its request."""

from collections.abc import Sequence

import httpx
import pytest

from policies.health import HealthAlert
from proxy.config.values import Config
from proxy.features.feature import Feature, Features, Overflow, Turn, TurnEnd
from proxy.planning.values import Plan
from proxy.store.records import ConversationRow
from tests.functional.harness import COUNTER, Talk, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator


class Noting(Feature):
    """Notes which hooks were called, and for whom."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.turns: list[Turn] = []
        self.end: TurnEnd | None = None

    def note(self, hook: str, turn: Turn) -> None:
        self.called.append(hook)
        self.turns.append(turn)

    def on_read(self, turn: Turn) -> None:
        self.note("read", turn)

    def on_planned(self, turn: Turn, plan: Plan) -> None:
        self.note("planned", turn)

    def on_overflow(self, turn: Turn, overflow: Overflow) -> None:
        self.note("overflow", turn)

    def on_alerts(self, turn: Turn, alerts: Sequence[HealthAlert]) -> None:
        self.note("alerts", turn)

    def on_answered(self, turn: Turn, end: TurnEnd) -> None:
        self.note("answered", turn)
        self.end = end

    def adopt(self, config: Config) -> None:
        self.called.append("adopt")

    def forget(self, conversation: ConversationRow) -> None:
        self.called.append(f"forget {conversation.name}")


class Broken(Noting):
    """Raises in every hook of a request."""

    def note(self, hook: str, turn: Turn) -> None:
        raise RuntimeError(hook)


async def test_a_hook_that_raises_costs_neither_the_request_nor_the_next_feature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noting = Noting()
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url) as running,
    ):
        running.runtime.features = Features([Broken(), noting])
        talk = Talk(running.client())
        await talk.ask(extra_headers={"x-weir-conversation": "mine"})
        await running.stored()

        assert noting.called == ["read", "planned", "answered"]
        assert [turn.conversation for turn in noting.turns] == [None, "mine", "mine"]
        assert len({turn.request for turn in noting.turns}) == 1
        assert noting.end is not None
        assert (noting.end.status, noting.end.outcome) == (200, "ok")
        assert [r.getMessage() for r in caplog.records if r.name == "weir.features"] == [
            "a hook of a feature failed"
        ] * 3

        noting.called.clear()
        address = f"{running.root}/weir/conversations/mine"
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as client:
            assert (await client.delete(address)).status_code == 200
        running.runtime.adopt(running.runtime.config)
        assert noting.called == ["forget mine", "adopt"]


def test_only_hooks_that_a_feature_defines_are_called() -> None:
    class Quiet(Feature):
        pass

    quiet = Quiet()
    features = Features([quiet])
    assert [features.on_read, features.on_planned, features.on_answered] == [()] * 3
    assert features[Quiet] is quiet
    with pytest.raises(KeyError, match="Noting"):
        features[Noting]
