"""No key of the configuration is dead: a Weir that starts and serves reads each, beside what only holds and checks them."""

import asyncio
import dataclasses
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policies.health import HealthAlert
from proxy.cli import serve as command
from proxy.config.file import dataclasses_in
from proxy.config.values import Config, FileValues
from proxy.features.alerts import Alerts, Notice
from proxy.upstream.client import providers_for
from tests.functional.harness import COUNTER, opening, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

HOLDING = frozenset({"proxy.config.loading", "proxy.config.values", "proxy.config.file", "functools", __name__})
ALERT = HealthAlert("overflow", "critical", "overflow", 1.0, 2.0, 1.0, "said")
AT_THE_START = {("AuthSettings", "open_beyond_loopback")}  # decides whether there is a Weir at all, see test_config.py
YAML = """
listen: {{port: 0}}
window: 8192
upstreams:
  main: {{base_url: "{upstream}", api_key: sk-operator, forward_trace: false}}
  claude: {{kind: litellm, provider: anthropic, api_base: "{upstream}", api_key: sk-claude}}
models:
  - {{match: "sim*", upstream: main, window: 8192, max_input: 8000, max_output: 512, tokenizer: o200k_base, prices: {{input: 1, output: 2, cache_read: 0.5, cache_write: 1.5}}}}
auth: {{mode: keys, admin_token: admin-0123456789}}
keys: [{{name: bot, secret: key-of-the-bot, policy: balanced, models: ["sim*"], allow: [mode, policy], team: all, upstream_key: sk-of-the-bot}}]
teams: {{all: {{budgets: [{{period: day, tokens: 1000000, dollars: 100}}]}}}}
policies: {{mine: {{preset: balanced}}}}
telemetry: {{alerts: {{webhook: "{alerts}", secret: whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz}}}}
"""


def shapes(shape: type = FileValues) -> Iterator[type]:
    """Every dataclass that the file is made of."""
    yield shape
    for hint in typing.get_type_hints(shape, include_extras=True).values():
        for each in dataclasses_in(hint):
            yield from shapes(each)


def fields(shape: type) -> list[str]:
    return [item.name for item in dataclasses.fields(shape)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The fields that were read by the product, as (class, field)."""
    seen = set[tuple[str, str]]()

    def watch(shape: type) -> None:
        names, plain = frozenset(fields(shape)), shape.__getattribute__

        def reading(self: object, name: str) -> Any:
            if name in names:
                frame = sys._getframe(1)
                while frame.f_globals["__name__"] in HOLDING and frame.f_back is not None:
                    frame = frame.f_back
                if frame.f_globals["__name__"].startswith("proxy."):
                    seen.add((shape.__name__, name))
            return plain(self, name)

        monkeypatch.setattr(shape, "__getattribute__", reading)

    for shape in {*shapes(), Config}:
        watch(shape)
    return seen


@pytest.mark.requirement("S.14", "A0.45")
async def test_every_key_of_the_configuration_is_read_by_a_weir_that_serves(
    read: set[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.app.KEYS_EVERY", 0.01)
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, alerts=f"{simulator.base_url}/alerts")
        async with (
            weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target,
            aiohttp.ClientSession() as session,
        ):
            runtime, config = target.runtime, target.runtime.config
            with command._listening(config):
                pass
            providers_for(config.upstreams.values())
            command._limits(config)
            command._telemetry_settings(config)
            command._announce(config, 1, runtime.keyring, "")
            client = target.client("key-of-the-bot")
            async for _ in await client.chat.completions.create(model="sim", messages=opening(), stream=True):
                pass
            headers = {"authorization": "Bearer admin-0123456789"}
            async with session.get(f"{target.root}/weir/policies", headers=headers) as answer:
                assert answer.status == 200
            await runtime.write_queue.flush()
            async with session.get(f"{target.root}/readyz") as answer:
                assert answer.status == 200
            async with session.get(f"{target.root}/weir/ui/login", headers={"origin": target.root}) as answer:
                assert answer.status == 200
            (row,) = await runtime.store.conversations(None)
            (exchange,) = await runtime.store.timeline(row)
            at = f"{target.root}/weir/conversations/{row.id}/requests/{exchange.id}"
            async with session.get(at, headers=headers) as answer:
                assert answer.status == 200
            runtime.features[Alerts].emit(
                Notice(alert=ALERT, tenant="t", conversation="c", policy="balanced", request="r")
            )
            await runtime.features[Alerts].close()
            async with asyncio.timeout(60):
                while ("StoreSettings", "retention") not in read:
                    await asyncio.sleep(0.01)
    missing = (
        {(shape.__name__, name) for shape in {*shapes()} - {FileValues} for name in fields(shape)} - read - AT_THE_START
    )
    missing |= {("Config", name) for name in fields(FileValues)} - read
    assert " ".join(f"{a}.{b}" for a, b in sorted(missing)) == ""
