"""Budgets of keys and teams, through the front door: what is refused, what is said, and who paid."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.access.admission import key_digest
from proxy.store import Store
from proxy.store.records import StoreUnavailable
from tests.functional.harness import RunningWeir, WeirProcess, free_port, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted

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

    async def ask(self, name: str, path: str = "chat/completions", **more: Any) -> httpx.Response:
        """One request, once it is settled."""
        headers = {"authorization": f"Bearer secret-{name}", **more.pop("headers", {})}
        body = {"model": "m", "messages": HELLO, "max_tokens": 5, **more}
        answer = await self.http.post(f"{self.target.root}/v1/{path}", json=body, headers=headers)
        await self.target.stored()
        return answer

    async def statuses(self, name: str, times: int, **more: Any) -> list[int]:
        return [(await self.ask(name, **more)).status_code for _ in range(times)]

    async def get(self, path: str, name: str | None = None) -> Any:
        headers = OPERATOR if name is None else {"authorization": f"Bearer secret-{name}"}
        answer = await self.http.get(f"{self.target.root}/weir/{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def opened(folder: Path, *, more: str = "", **options: Any) -> AsyncIterator[Office]:
    async with scripted(fifteen) as upstream:
        yaml = CONFIG.format(url=upstream.base_url, more=more)
        options = {"yaml": yaml, "folder": folder, "window": None, "env": {}, **options}
        async with weir("", folder / "w.db", **options) as target, httpx.AsyncClient() as http:
            yield Office(target, http)


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
