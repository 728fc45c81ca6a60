"""Budgets of keys and teams, through the front door: what is refused, what is said, and who paid."""

import asyncio
import contextlib
import csv
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.access import budgets
from proxy.access.admission import key_digest
from proxy.cli import main
from proxy.config.file import ConfigError
from proxy.config.loading import load_config
from proxy.store import Store
from proxy.store.records import StoreUnavailable
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import COUNTER, RunningWeir, WeirProcess, free_port, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted, whole
from tests.upstream import Dialect
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

CONFIG = """
upstreams: {{main: {{base_url: "{url}", api_key: sk-operator}}}}
models: [{{match: "m*", window: 8192, prices: {{input: 1000, output: 10000}}}}]
auth: {{admin_token: operator-token}}
teams:
  research: {{budgets: [{{period: day, tokens: 60}}]}}
  busy: {{requests_per_minute: 2}}
  wordy: {{tokens_per_minute: 100}}
keys:
  - {{name: hard, secret: secret-hard, budgets: [{{period: day, tokens: 40}}]}}
  - {{name: near, secret: secret-near, budgets: [{{period: day, tokens: 36}}]}}
  - {{name: rich, secret: secret-rich, budgets: [{{period: month, dollars: 0.13}}]}}
  - {{name: soft, secret: secret-soft, budgets: [{{period: week, tokens: 20, hard: false}}]}}
  - {{name: ann, secret: secret-ann, team: research}}
  - {{name: bob, secret: secret-bob, team: research}}
  - {{name: cy, secret: secret-cy, team: busy}}
  - {{name: dee, secret: secret-dee, team: busy}}
  - {{name: eve, secret: secret-eve, team: wordy}}
  - {{name: free, secret: secret-free}}
{more}
"""
HELLO: Sequence[Any] = [{"role": "user", "content": "hi"}]
OPERATOR = {"authorization": "Bearer operator-token"}


def fifteen(asked: Asked) -> Reply:
    """Ten tokens of a prompt and five of an answer, which cost 6 cents."""
    return as_asked(asked, completion("ok", prompt=10, completed=5))


@dataclass(frozen=True, slots=True)
class Office:
    """One Weir, and who asks it."""

    target: RunningWeir
    http: httpx.AsyncClient
    folder: Path

    async def ask(self, name: str, path: str = "chat/completions", **more: Any) -> httpx.Response:
        """One request, once it is settled."""
        headers = {"authorization": f"Bearer secret-{name}", **more.pop("headers", {})}
        body = {"model": "m", "messages": HELLO, "max_tokens": 5, **more}
        answer = await self.http.post(f"{self.target.root}/v1/{path}", json=body, headers=headers)
        await self.target.stored()
        return answer

    async def statuses(self, name: str, times: int, **more: Any) -> list[int]:
        return [(await self.ask(name, **more)).status_code for _ in range(times)]

    async def with_secret(self, secret: str, times: int) -> list[int]:
        """The statuses of so many requests with a key that was made."""
        headers = {"authorization": f"Bearer {secret}"}
        return [(await self.ask("", headers=headers)).status_code for _ in range(times)]

    async def post(self, path: str, body: Any) -> Any:
        """What the operator's request is answered."""
        answer = await self.http.post(f"{self.target.root}/weir/{path}", json=body, headers=OPERATOR)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def get(self, path: str, name: str | None = None, *, secret: str = "") -> Any:
        key = secret or (name and f"secret-{name}")
        headers = {"authorization": f"Bearer {key}"} if key else OPERATOR
        answer = await self.http.get(f"{self.target.root}/weir/{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def opened(
    folder: Path, *, more: str = "", say: Callable[[Asked], Reply] = fifteen, **options: Any
) -> AsyncIterator[Office]:
    async with scripted(say) as upstream:
        yaml = CONFIG.format(url=upstream.base_url, more=more)
        options = {"yaml": yaml, "folder": folder, "window": None, "env": {}, **options}
        async with weir("", folder / "w.db", **options) as target, httpx.AsyncClient() as http:
            yield Office(target, http, folder)


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as running:
        yield running


async def test_a_hard_budget_refuses_what_comes_beyond_it_until_its_period_ends(office: Office) -> None:
    answers = [await office.ask("hard") for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    said = [each.headers["x-weir-budget"] for each in answers]
    assert said == [f"tokens={used}/40;period=day;key=hard" for used in (0, 15, 30, 45)]
    refused = answers[-1].json()["error"]
    assert (refused["type"], refused["code"]) == ("insufficient_quota", "insufficient_quota")
    for words in ("the key hard", "40 tokens a day", "45 tokens", "00:00 UTC", "ask the operator"):
        assert words in refused["message"]
    seconds = int(answers[-1].headers["retry-after"])
    assert seconds == pytest.approx(86_400 - time.time() % 86_400, abs=30)
    assert answers[-1].headers["x-should-retry"] == "false"
    assert await office.statuses("free", 3) == [200] * 3
    assert "x-weir-budget" not in (await office.ask("free")).headers


async def test_the_refusal_is_what_each_sdk_knows_as_a_rate_limit(office: Office) -> None:
    await office.statuses("hard", 3)
    client = office.target.client("secret-hard")
    with pytest.raises(openai.RateLimitError) as raised:
        await client.chat.completions.create(model="m", messages=HELLO)
    assert raised.value.code == "insufficient_quota"
    body = {"model": "m", "max_tokens": 5, "messages": HELLO}
    refused = await office.ask("hard", "messages", **body)
    assert refused.status_code == 429
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_a_budget_of_dollars_counts_list_prices(office: Office) -> None:
    assert await office.statuses("rich", 4) == [200, 200, 200, 429]
    refused = await office.ask("rich")
    assert "$0.13 a month" in refused.text
    assert "$0.18" in refused.text
    assert refused.headers["x-weir-budget"] == "dollars=0.18/0.13;period=month;key=rich"


async def test_a_soft_budget_only_says_that_it_is_used_up(office: Office) -> None:
    answers = [await office.ask("soft") for _ in range(4)]
    assert [each.status_code for each in answers] == [200] * 4
    assert answers[-1].headers["x-weir-budget"] == "tokens=45/20;period=week;key=soft"
    page, _ = office.target.runtime.telemetry.metrics.render()
    assert b'weir_key="soft",weir_period="week",weir_team="",weir_unit="tokens"} 2.25' in page


async def test_the_keys_of_a_team_use_one_budget(office: Office) -> None:
    assert [(await office.ask(name)).status_code for name in ("ann", "bob", "ann", "bob")] == [200] * 4
    refused = await office.ask("ann")
    assert refused.status_code == 429
    assert "The budget of the team research, 60 tokens a day, is used up" in refused.text
    assert (await office.ask("bob")).headers["x-weir-budget"].endswith(";team=research")


async def test_a_team_has_rates_of_its_own(office: Office) -> None:
    assert await office.statuses("cy", 1) + await office.statuses("dee", 2) == [200, 200, 429]
    assert "The team busy has begun 2 requests within a minute" in (await office.ask("cy")).text
    assert await office.statuses("eve", 1, max_tokens=90) == [200]
    assert await office.statuses("eve", 2, max_tokens=90) == [200, 429]
    refused = await office.ask("eve")
    assert "The team wordy has taken 100 tokens within a minute" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_what_is_relayed_counts_and_is_refused_too(office: Office) -> None:
    answers = [await office.ask("hard", "completions", prompt="x") for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    assert answers[-1].headers["x-weir-budget"] == "tokens=45/40;period=day;key=hard"


STREAMED: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "off": ("chat/completions", {}, {"x-weir-mode": "off"}),
    "forbidden": ("chat/completions", {"transforms": []}, {}),
    "relayed": ("completions", {"prompt": "x" * 40}, {}),
}
"""Streams that Weir does not count for their own sake: switched off, not to be edited, relayed."""


@pytest.mark.parametrize("how", STREAMED)
async def test_a_stream_whose_usage_nobody_asked_for_counts_as_well(how: str, tmp_path: Path) -> None:
    path, more, headers = STREAMED[how]
    key = "  - {name: sly, secret: secret-sly, allow: [mode], budgets: [{period: day, tokens: 40}]}"
    async with opened(tmp_path, more=key) as office:
        statuses = await office.statuses("sly", 6, path=path, stream=True, headers=headers, **more)
        assert statuses[0] == 200
        assert statuses[-1] == 429


async def test_a_compaction_by_the_provider_is_refused_too_and_a_count_is_not(office: Office) -> None:
    await office.statuses("hard", 3)
    assert await office.statuses("hard", 1, path="responses/compact", input="hi", messages=None) == [429]
    assert await office.statuses("hard", 1, path="messages/count_tokens") == [200]
    assert await reservations(office.target) == 0


async def test_what_is_in_flight_may_not_pass_a_budget_either(office: Office) -> None:
    answers = await asyncio.gather(*(office.ask("hard", max_tokens=50) for _ in range(8)))
    statuses = sorted(each.status_code for each in answers)
    assert statuses[0] == 200
    waits = [each for each in answers if each.status_code == 429]
    assert waits
    assert {each.json()["error"]["code"] for each in waits} <= {"rate_limit_exceeded", "insufficient_quota"}
    assert await office.statuses("hard", 1) in ([200], [429])
    used = (await office.get("usage?by=key"))["total"]
    assert used["prompt"] + used["completion"] <= 40 + 15


async def test_the_answer_of_a_relayed_completion_is_reserved_too(tmp_path: Path) -> None:
    def slowly(asked: Asked) -> Reply:
        between = 1.0 if "/completions" in asked.target else 0.0
        return replace(fifteen(asked), chunks=(b" ", *fifteen(asked).chunks), between=between)

    async with opened(tmp_path, say=slowly) as office:
        ask = [office.ask("hard", "completions", prompt="x", max_tokens=45) for _ in range(8)]
        statuses = sorted(each.status_code for each in await asyncio.gather(*ask))
        assert statuses == [200, *[429] * 7]


async def test_a_client_that_asks_in_turns_does_not_wait_for_its_own_answers(office: Office) -> None:
    """What is answered holds nothing of a budget, although its row is stored in the background."""
    body = {"model": "m", "messages": HELLO, "max_tokens": 50}
    headers = {"authorization": "Bearer secret-hard"}
    at = f"{office.target.root}/v1/chat/completions"
    answers = [await office.http.post(at, json=body, headers=headers) for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    assert answers[-1].json()["error"]["code"] == "insufficient_quota"


async def test_where_the_store_cannot_say_the_request_is_allowed_and_says_so(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object, **__: object) -> None:
        raise StoreUnavailable("away", reason="unreachable")

    await office.statuses("hard", 3)
    monkeypatch.setattr(office.target.runtime.store, "reserve", unavailable)
    answer = await office.ask("hard")
    assert answer.status_code == 200
    assert answer.headers["x-weir-actions"] == "degraded=budget"
    page, _ = office.target.runtime.telemetry.metrics.render()
    assert b'weir_degraded_total{weir_reason="budget"} 1.0' in page
    relayed = await office.ask("hard", "completions", prompt="x")
    assert relayed.headers["x-weir-actions"] == "relayed,degraded=budget"


async def test_a_model_without_a_price_costs_no_dollars_and_its_answers_say_so(office: Office) -> None:
    answers = [await office.ask("rich", model="unheard-of") for _ in range(4)]
    assert [each.status_code for each in answers] == [200] * 4
    assert {each.headers["x-weir-actions"] for each in answers} == {"degraded=price"}
    assert (await office.ask("hard", model="unheard-of")).headers["x-weir-actions"] == "none"


async def test_a_request_that_runs_for_longer_than_a_lease_keeps_its_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "LEASE", 1.0)
    monkeypatch.setattr("proxy.app.RESERVED_EVERY", 0.2)
    monkeypatch.setattr("proxy.app.KEYS_EVERY", 0.1)

    def say(asked: Asked) -> Reply:
        if asked.json.get("model") == "slow":
            return replace(fifteen(asked), chunks=(b" ", *fifteen(asked).chunks), between=3.0)
        return fifteen(asked)

    async with opened(tmp_path, say=say) as office:
        running = asyncio.create_task(office.ask("hard", model="slow", max_tokens=50))
        await asyncio.sleep(2.0)
        refused = await office.http.post(
            f"{office.target.base_url}/chat/completions",
            json={"model": "m", "messages": HELLO},
            headers={"authorization": "Bearer secret-hard"},
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert "requests in flight may take" in refused.text
        assert (await running).status_code == 200
        assert await office.statuses("hard", 1) == [200]


async def test_the_bill_survives_deletion_and_retention(office: Office) -> None:
    headers = {"x-weir-conversation": "gone"}
    await office.statuses("hard", 3, headers=headers)
    gone = await office.http.delete(f"{office.target.root}/weir/conversations/gone", headers=OPERATOR)
    assert gone.status_code == 200
    await office.target.runtime.store.prune(2**40)
    await office.target.runtime.store.prune_usage(time.time() + 86_400)  # a month's budget looks back
    assert (await office.ask("hard")).status_code == 429


async def test_no_header_begins_another_bill(tmp_path: Path) -> None:
    more = "store: {retention: 30d}"
    env = {"WEIR_AUTH_TENANT": "header:X-User"}
    async with opened(tmp_path, more=more, env=env) as office:
        answers = [await office.ask("hard", headers={"x-user": f"user-{n}"}) for n in range(4)]
        assert [each.status_code for each in answers] == [200, 200, 200, 429]


async def test_a_key_without_a_budget_pays_nothing(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reserve(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(office.target.runtime.store, "reserve", reserve)
    assert await office.statuses("free", 2) == [200, 200]


async def test_no_reservation_is_left_when_requests_have_ended(office: Office) -> None:
    await office.statuses("hard", 4)
    assert (await office.ask("ann", model=5)).status_code == 400
    assert await reservations(office.target) == 0


HURRIED = """
import sys
from proxy.access import budgets
budgets.LEASE, budgets.RENEWED_EVERY = 4.0, 1.0
from proxy.cli import main
main(sys.argv[4:])
"""
SHORT = (sys.executable, "-c", HURRIED)
"""A command that starts a Weir whose reservations expire after four seconds."""
CLIENTS, REQUESTS = 16, 2_000


@asynccontextmanager
async def replicas(
    url: str, folder: Path, upstream: str, *, limit: int, **options: Any
) -> AsyncIterator[list[WeirProcess]]:
    """Two Weirs on a PostgreSQL, and a key each with a budget of tokens and of dollars for so many requests."""
    budgets = {"tokens": f"tokens: {15 * limit}", "dollars": f"dollars: {0.06 * limit:.2f}"}
    keys = [
        f"  - {{name: {name}, secret: secret-{name}, budgets: [{{period: month, {most}}}]}}"
        for name, most in budgets.items()
    ]
    head = CONFIG.partition("teams:")[0].format(url=upstream)
    config = folder / "weir.yaml"
    config.write_text("\n".join([head, "keys:", *keys]) + "\n")
    arguments = ["--config", str(config), "--store", url]
    async with contextlib.AsyncExitStack() as stack:
        ones = [WeirProcess(list(arguments), free_port(), **options) for _ in "ab"]
        yield [await stack.enter_async_context(each) for each in ones]


class Crowd:
    """Clients that ask in turns; what each was answered is added up."""

    def __init__(self, targets: Sequence[WeirProcess], http: httpx.AsyncClient) -> None:
        self.targets = targets
        self.http = http
        self.seen: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.codes: set[str] = set()

    async def ask(self, name: str, target: WeirProcess) -> None:
        headers = {"authorization": f"Bearer secret-{name}"}
        body = {"model": "m", "messages": HELLO, "max_tokens": 5}
        try:
            answer = await self.http.post(f"{target.base_url}/chat/completions", json=body, headers=headers)
        except httpx.TransportError:
            self.seen[name, 0] += 1
            return
        self.seen[name, answer.status_code] += 1
        if answer.status_code == 200:
            self.tokens[name] += answer.json()["usage"]["total_tokens"]
        else:
            self.codes.add(answer.json()["error"]["code"])

    async def run(self, client: int, times: int) -> None:
        name = ("tokens", "dollars")[client % 2]
        for turn in range(times):
            await self.ask(name, self.targets[(client + turn) % len(self.targets)])


async def used(url: str) -> dict[str, tuple[int, float]]:
    """What each key has used by the store, in tokens and dollars, once nothing is reserved any more."""
    store = await Store.open(url)
    try:
        async with asyncio.timeout(30):
            while await store._database.read(
                lambda c: c.exec_driver_sql("SELECT count(*) FROM reservations").scalar_one()
            ):
                await asyncio.sleep(0.1)
        rows = await store.usage(None, since=0, by="key")
        secret = await store.secret()
        names = {key_digest(secret, f"secret-{name}".encode())[:32]: name for name in ("tokens", "dollars")}
        return {names[row.group or ""]: (row.prompt + row.completion, row.cost) for row in rows}
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_replicas_under_load_pass_a_budget_by_one_request_each_at_most(
    postgres_url: str, tmp_path: Path
) -> None:
    limit = REQUESTS // 4
    async with scripted(fifteen) as upstream, httpx.AsyncClient(timeout=60) as http:
        async with replicas(postgres_url, tmp_path, upstream.base_url, limit=limit) as ones:
            crowd = Crowd(ones, http)
            await asyncio.gather(*(crowd.run(client, REQUESTS // CLIENTS) for client in range(CLIENTS)))
        asked = sum(each.target.endswith("/chat/completions") for each in upstream.asked)
    taken = await used(postgres_url)
    assert sum(crowd.seen.values()) == REQUESTS
    assert {status for _, status in crowd.seen} == {200, 429}
    assert sum(count for (_, status), count in crowd.seen.items() if status == 200) == asked
    for name in ("tokens", "dollars"):
        tokens, dollars = taken[name]
        assert tokens == crowd.tokens[name] == 15 * crowd.seen[name, 200]
        assert dollars == pytest.approx(0.06 * crowd.seen[name, 200])
        assert limit <= crowd.seen[name, 200] <= limit + 2
    assert crowd.codes <= {"insufficient_quota", "rate_limit_exceeded"}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_replica_that_is_killed_counts_nothing_twice_and_its_reservations_come_back(
    postgres_url: str, tmp_path: Path
) -> None:
    def slowly(asked: Asked) -> Reply:
        return replace(fifteen(asked), between=0.05)

    async with scripted(slowly) as upstream, httpx.AsyncClient(timeout=60) as http:
        async with replicas(postgres_url, tmp_path, upstream.base_url, limit=10_000, within=SHORT) as ones:
            crowd = Crowd(ones, http)
            running = [asyncio.create_task(crowd.run(client, 60)) for client in range(CLIENTS)]
            for _ in range(3):
                await asyncio.sleep(1.0)
                await ones[0].stop(signal.SIGKILL)
                await ones[0].start()
            await asyncio.gather(*running)
            taken = await used(postgres_url)
        asked = sum(each.target.endswith("/chat/completions") for each in upstream.asked)
    answered = sum(count for (_, status), count in crowd.seen.items() if status == 200)
    assert sum(count for (_, status), count in crowd.seen.items() if status == 0) > 0
    counted = sum(tokens for tokens, _ in taken.values()) / 15
    assert counted == int(counted)
    assert counted <= asked
    assert answered - 3 * CLIENTS <= counted  # rows that waited to be stored when the process was killed


async def reservations(target: RunningWeir) -> int:
    """How many reservations there are."""
    query = "SELECT count(*) FROM reservations"
    return await target.runtime.store._database.read(lambda c: c.exec_driver_sql(query).scalar_one())


async def test_a_rotated_key_goes_on_with_its_bill(office: Office) -> None:
    made = await office.post("keys", {"name": "turned", "budgets": ["day,tokens=40"]})
    assert (made["team"], made["budgets"]) == (None, ["day,tokens=40"])
    assert await office.with_secret(made["secret"], 3) == [200] * 3
    turned = await office.post("keys/turned/rotate", {})
    assert await office.with_secret(turned["secret"], 1) == [429]


async def test_both_secrets_of_a_rotated_key_have_the_budget_that_it_is_given_meanwhile(office: Office) -> None:
    made = await office.post("keys", {"name": "turned", "requests_per_minute": 9})
    command = ["keys", "rotate", "turned", "--grace", "1h", "--store", str(office.folder / "w.db"), "--json"]
    turned = json.loads((await asyncio.to_thread(CliRunner().invoke, main, command)).stdout)
    await office.post("keys/turned/budgets", {"budgets": ["day,tokens=40"]})
    assert await office.with_secret(made["secret"], 1) == [200]
    assert await office.with_secret(turned["secret"], 2) == [200, 200]
    refused = await office.ask("", headers={"authorization": f"Bearer {made['secret']}"})
    assert refused.status_code == 429
    assert "The budget of the key turned, 40 tokens a day, is used up" in refused.text
    assert [row["used"] for row in (await office.get("budgets"))["data"] if row["name"].startswith("turned")] == [45]


async def test_a_budget_is_set_while_weir_runs_and_counts_what_was_used_before(office: Office) -> None:
    made = await office.post("keys", {"name": "later", "team": "research"})
    assert await office.with_secret(made["secret"], 2) == [200, 200]
    rows = {row["of"]: row for row in (await office.get("budgets", secret=made["secret"]))["data"]}
    assert rows["team"] | {"resets": 0} == {
        "of": "team",
        "name": "research",
        "period": "day",
        "unit": "tokens",
        "limit": 60,
        "used": 30,
        "reserved": 0,
        "resets": 0,
        "hard": True,
    }
    changed = await office.post("keys/later/budgets", {"team": None, "budgets": ["month,tokens=31,dollars=9"]})
    assert changed == {"name": "later", "team": None, "budgets": ["month,tokens=31,dollars=9"]}
    assert await office.with_secret(made["secret"], 2) == [200, 429]
    own = (await office.get("budgets", secret=made["secret"]))["data"]
    assert [(row["unit"], row["used"]) for row in own] == [("tokens", 45), ("dollars", 0.18)]
    (row,) = [row for row in (await office.get("keys"))["data"] if row["name"] == "later"]
    assert (row["team"], row["budgets"]) == (None, ["month,tokens=31,dollars=9"])
    by_team = {row["group"]: row["requests"] for row in (await office.get("usage?by=team"))["data"]}
    assert by_team == {"research": 2, "": 2}


async def test_usage_by_team_and_key_as_json_and_csv(office: Office) -> None:
    for name in ("ann", "ann", "bob", "hard", "free"):
        await office.ask(name)
    found = await office.get("usage?by=team")
    assert {row["group"]: row["requests"] for row in found["data"]} == {"research": 3, "": 2}
    by_key = await office.get("usage?by=key")
    assert {row["group"]: row["requests"] for row in by_key["data"]} == {"ann": 2, "bob": 1, "hard": 1, "free": 1}
    assert by_key["total"] == (await office.get("usage"))["total"]
    own = await office.get("usage?by=team", "bob")
    assert [(row["group"], row["requests"]) for row in own["data"]] == [("research", 1)]
    at = f"{office.target.root}/weir/usage?by=team&format=csv"
    table = await office.http.get(at, headers=OPERATOR)
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    head, *lines = csv.reader(table.text.splitlines())
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert {row["group"]: row["completion"] for row in rows} == {"research": "15", "": "10"}
    path = office.folder / "weir.yaml"
    command = ["usage", "--config", str(path), "--store", str(office.folder / "w.db"), "--by", "team"]
    said = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--csv"])
    assert said.stdout.splitlines() == table.text.splitlines()
    said = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--key", "bob", "--json"])
    assert json.loads(said.stdout)["total"]["requests"] == 1
    assert "no team" in (await asyncio.to_thread(CliRunner().invoke, main, command)).stdout


async def test_an_alert_goes_out_once_in_a_period_at_80_percent_and_when_it_is_used_up(tmp_path: Path) -> None:
    async with hooked() as (address, told):
        more = f'telemetry: {{alerts: {{webhook: "{address}"}}}}'
        async with opened(tmp_path, more=more) as office:
            await office.statuses("near", 5)
            await office.statuses("soft", 4)
            await office.target.runtime.features.close()
    said = [(each["data"]["kind"], each["data"]["level"]) for each in told]
    assert said == [
        ("budget_nearly_used", "warning"),
        ("budget_refuses", "critical"),
        ("budget_used_up", "warning"),
    ]
    assert told[1]["data"]["said"].startswith("The budget of the key near, 36 tokens a day, is used up")
    assert len({each["id"] for each in told}) == 3


@asynccontextmanager
async def hooked() -> AsyncIterator[tuple[str, list[Any]]]:
    """The address of a webhook, and what it was told."""
    told: list[Any] = []

    def take(asked: Asked) -> Reply:
        told.append(asked.json)
        return whole({})

    async with scripted(take) as receiver:
        yield f"http://127.0.0.1:{receiver.port}/hook", told


WRONG = {
    "teams: {t: {budgets: [{period: year, tokens: 5}]}}": "teams.t.budgets[0].period: should be 'day', 'week' or 'month'",
    "teams: {t: {budgets: [{period: day, tokens: -5}]}}": "teams.t.budgets[0].tokens: should be greater than 0",
    "teams: {t: {budgets: [{period: day, tokens: 0}]}}": "teams.t.budgets[0].tokens: should be greater than 0",
    "teams: {t: {budgets: [{period: day, dollars: .nan}]}}": "teams.t.budgets[0].dollars: should be a finite number",
    "teams: {t: {budgets: [{period: day}]}}": "teams.t.budgets[0]: should have tokens, dollars or both",
    "teams: {t: {budgets: [{period: day, tokns: 5}]}}": "did you mean tokens?",
    "teams: {t: {budgets: [{period: day, tokens: 5}, {period: day, tokens: 6}]}}": "one budget for the tokens of a day",
    "teams: {t: {}, t: {}}": "teams.t: stands here twice",
    "teams: {t: {requests_per_minute: 0}}": "teams.t.requests_per_minute: should be greater than 0",
    "keys: [{name: a, secret: secret-a, team: tem}]\nteams: {team: {}}": "no team tem; did you mean team?",
    "keys: [{name: a, secret: secret-a, team: t}]": "keys[0].team: no team t; name it under teams",
    "keys: [{name: a, secret: secret-a, budgets: [{period: day, tokens: 1.5}]}]": "should be a whole number",
}


@pytest.mark.parametrize("yaml", WRONG, ids=range(len(WRONG)))
def test_a_wrong_budget_in_the_file_is_said_with_its_place(yaml: str, tmp_path: Path) -> None:
    path = tmp_path / "weir.yaml"
    path.write_text(yaml)
    with pytest.raises(ConfigError) as raised:
        load_config(path, env={})
    assert WRONG[yaml] in str(raised.value)
    assert "weir.yaml:" in str(raised.value)


async def test_a_key_whose_team_is_gone_from_the_file_is_warned_of(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    await office.post("keys", {"name": "orphan", "team": "research"})
    runtime = office.target.runtime
    teams = {name: team for name, team in runtime.config.teams.items() if name != "research"}
    runtime.adopt(replace(runtime.config, teams=teams))
    for _ in range(2):
        runtime.take_keys(await runtime.store.list_keys())
    said = [each for each in caplog.messages if "the key orphan is of the team research" in each]
    assert len(said) == 1
    assert "name it under teams, or weir keys set orphan --team" in said[0]


async def test_a_request_for_several_answers_reserves_all_of_them(tmp_path: Path) -> None:
    def slowly(asked: Asked) -> Reply:
        between = 1.0 if asked.json.get("n") else 0.0
        return replace(fifteen(asked), chunks=(b" ", *fifteen(asked).chunks), between=between)

    async with opened(tmp_path, say=slowly) as office:
        running = asyncio.create_task(office.ask("hard", n=8))
        while not await reservations(office.target):
            await asyncio.sleep(0.01)
        (row,) = (await office.get("budgets", "hard"))["data"]
        assert row["reserved"] >= 8 * 5
        await running


BODIES = {
    "year,tokens=5": "period should be 'day', 'week' or 'month'",
    "day,tokens=-5": "tokens should be greater than 0",
    "day,dollars=0": "dollars should be greater than 0",
    "day": "should have tokens, dollars or both",
    "day,token=5": "has 'token=5'",
    "day,tokens=5,tokens=6": "has tokens twice",
}


@pytest.mark.parametrize("text", BODIES)
async def test_a_wrong_budget_is_refused_by_the_api_and_the_command(text: str, office: Office) -> None:
    headers = OPERATOR
    for path, body in (("keys", {"name": "n", "budgets": [text]}), ("keys/n/budgets", {"budgets": [text]})):
        answer = await office.http.post(f"{office.target.root}/weir/{path}", json=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert BODIES[text] in answer.json()["error"]["message"]
        assert "a budget is written day,tokens=1000000" in answer.json()["error"]["message"]
    command = ["keys", "create", "--name", "n", "--store", str(office.folder / "c.db"), "--budget", text]
    said = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert said.exit_code == 2
    assert BODIES[text] in said.stderr


async def test_a_team_that_does_not_exist_is_refused_by_the_api_and_the_command(office: Office) -> None:
    at = f"{office.target.root}/weir/keys"
    answer = await office.http.post(at, json={"name": "n", "team": "reserch"}, headers=OPERATOR)
    assert answer.status_code == 400
    assert "There is no team 'reserch'; did you mean research?" in answer.json()["error"]["message"]
    command = ["keys", "create", "--name", "n", "--store", str(office.folder / "c.db"), "--team", "t"]
    said = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert said.exit_code == 2
    assert "no team 't'; name it under teams" in said.stderr


def test_a_key_gets_a_team_and_budgets_from_the_command(tmp_path: Path) -> None:
    store = tmp_path / "w.db"
    config = tmp_path / "weir.yaml"
    config.write_text("teams: {research: {}}\n")

    def keys(*words: str) -> Any:
        return CliRunner().invoke(main, ["keys", *words, "--config", str(config), "--store", str(store)])

    made = keys("create", "--name", "n", "--team", "research", "--budget", "day,tokens=5", "--json")
    assert made.exit_code == 0, made.stderr
    assert (json.loads(made.stdout)["team"], json.loads(made.stdout)["budgets"]) == ("research", ["day,tokens=5"])
    said = keys("set", "n", "--team", "none", "--budget", "week,dollars=2.5,soft", "--budget", "month,tokens=9")
    assert said.stdout == (
        "n has no team, the budget week,dollars=2.5,soft and month,tokens=9 from its next request on.\n"
    )
    (row,) = json.loads(keys("list", "--json").stdout)
    assert (row["team"], row["budgets"]) == (None, ["week,dollars=2.5,soft", "month,tokens=9"])


FALLBACK = """
upstreams: {{main: {{base_url: "{url}", api_key: pass}}}}
models:
  - {{match: small, window: 2048, prices: {{input: 1, output: 1}}}}
  - {{match: large, window: 64000, prices: {{input: 1000, output: 1000}}}}
  - {{match: tiny, window: 1024}}
keys:
  - {{name: any, secret: secret-any}}
  - {{name: only-small, secret: secret-only-small, models: [small]}}
  - {{name: to-tiny, secret: secret-to-tiny, policy: tiny}}
policies:
  larger: {{preset: balanced, fallback: large}}
  tiny: {{preset: balanced, fallback: tiny}}
default_policy: larger
"""
LONG = "The harbour is deep and the ferry leaves at nine. " * 400


@asynccontextmanager
async def falling(
    folder: Path, path: str = "chat/completions", telemetry: Telemetry | None = None
) -> AsyncIterator[tuple[Office, RunningSimulator]]:
    dialect = Dialect.ANTHROPIC if path == "messages" else Dialect.OPENAI
    settings = SimulatorSettings(window=64_000, dialect=dialect)
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        yaml = FALLBACK.format(url=simulator.base_url)
        async with (
            weir("", folder / "w.db", yaml=yaml, folder=folder, window=None, telemetry=telemetry) as target,
            httpx.AsyncClient(timeout=60) as http,
        ):
            yield Office(target, http, folder), simulator


HI = [{"role": "user", "content": "hi"}]
ASKED: Mapping[str, Mapping[str, Any]] = {
    "chat/completions": {"messages": [{"role": "system", "content": LONG}, *HI]},
    "responses": {"instructions": LONG, "input": HI, "max_output_tokens": 50},
    "messages": {"system": LONG, "messages": HI, "max_tokens": 50},
}
"""Requests whose system prompt does not fit, of which nothing is ever removed."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_what_does_not_fit_goes_to_the_policys_fallback(path: str, stream: bool, tmp_path: Path) -> None:
    async with falling(tmp_path, path) as (office, upstream):
        headers = {"authorization": "Bearer secret-any", "x-weir-conversation": "long"}
        headers |= {"anthropic-version": "2023-06-01"}
        body = {"model": "small", "stream": stream, **ASKED[path]}
        answer = await office.http.post(f"{office.target.root}/v1/{path}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-weir-actions"] == "fallback=1"
        assert answer.headers["x-weir-model"] == "large"
        (asked,) = [each for each in upstream.ledger if each.path == f"/v1/{path}"]
        assert json.loads(asked.body)["model"] == "large"
        await office.target.stored()
        (row,) = (await office.get("conversations/long/timeline", "any"))["data"]
        assert (row["model"], row["actions"]) == ("large", "fallback=1")
        took = (row["usage_prompt"] + row["usage_completion"]) * 1000 / 1e6
        assert row["cost"] == pytest.approx(took, rel=0.2)
        short = json.loads(json.dumps(body).replace(LONG, "Be brief."))
        answer = await office.http.post(f"{office.target.root}/v1/{path}", json=short, headers=headers)
        assert answer.headers["x-weir-actions"] == "none"
        assert "x-weir-model" not in answer.headers


async def test_the_trace_of_a_request_names_its_fallback(tmp_path: Path) -> None:
    spans = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=spans)
    async with falling(tmp_path, telemetry=telemetry) as (office, _):
        assert (await office.ask("any", model="small", **ASKED["chat/completions"])).status_code == 200
        telemetry.flush()
    (root,) = [span for span in spans.get_finished_spans() if span.parent is None]
    (event,) = [event for event in root.events if event.name == "weir.fallback"]
    assert event.attributes == {"gen_ai.request.model": "large", "weir.reason": "context_length_exceeded"}
    assert root.name.endswith(" large")


async def test_what_does_not_fit_into_the_fallback_either_is_refused_as_before(tmp_path: Path) -> None:
    async with falling(tmp_path) as (office, upstream):
        refused = await office.ask("to-tiny", model="small", messages=ASKED["chat/completions"]["messages"])
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 2048 tokens" in error["message"]
        assert "the fallback tiny either, whose maximum context length is 1024 tokens" in error["message"]
        assert [each for each in upstream.ledger if each.path == "/v1/chat/completions"] == []


async def test_a_key_that_may_not_use_the_fallback_gets_the_refusal(tmp_path: Path) -> None:
    async with falling(tmp_path) as (office, _):
        refused = await office.ask("only-small", model="small", messages=ASKED["chat/completions"]["messages"])
        assert refused.status_code == 400
        assert "fallback" not in refused.text
        assert refused.headers["x-weir-actions"] == "none"
