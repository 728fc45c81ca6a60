"""What the planning leaves behind: growth, evictions, policies."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from proxy.store import Store
from proxy.store.budgets import Limit, Reservation
from proxy.store.records import DAY, ExchangeRow
from proxy.store.usage import By
from tests.proxy.store_rows import exchange, url


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url(tmp_path / "w.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def either(address: str) -> AsyncIterator[Store]:
    opened = await Store.open(address)
    yield opened
    await opened.close()


@pytest.mark.requirement("P7")
async def test_what_days_took_is_told_from_any_moment_on_and_forgotten_with_the_requests(either: Store) -> None:
    """Of three conversations in five days, one of another key; whatever was stored together or alone."""
    rows = []
    for number in range(40):
        tenant, name = ("tenant-b", "theirs") if number % 8 == 3 else ("tenant-a", f"c{number % 2}")
        row = exchange(number, tenant=tenant, conversation=name, branch=name, at=0.5 * DAY + 0.1 * DAY * number)
        detail = {"cost": 0.25, "cost_saved": 0.125} if number % 3 else {}
        rows.append(
            msgspec.structs.replace(row, model=f"m{number % 3}", status=500 if number == 17 else 200, detail=detail)
        )
    await either.record(rows[::2])
    for row in rows[1::2]:
        await either.record([row])
    await either.record(rows[:5])

    deleted = set[str]()

    async def check(since: float) -> None:
        for by in (None, *(each for each in get_args(By) if each not in ("team", "key"))):
            for tenant in (None, "tenant-a"):
                mine = [row for row in rows if row.at >= since // DAY * DAY and tenant in (None, row.tenant)]
                expected: dict[tuple[str, str | None], list[ExchangeRow]] = {}
                for row in mine:
                    day = f"1970-01-0{1 + int(row.at // DAY)}"
                    home = None if row.conversation in deleted else row.conversation
                    groups: dict[By | None, str | None] = {
                        None: None,
                        "day": day,
                        "model": row.model,
                        "policy": row.policy,
                    }
                    expected.setdefault((row.tenant, groups.get(by, home)), []).append(row)
                found = {(row.tenant, row.group): row for row in await either.usage(tenant, since=since, by=by)}
                assert found.keys() == expected.keys()
                for key, its in expected.items():
                    told = found[key]
                    answered = [row for row in its if row.status == 200]
                    assert (told.requests, told.failed) == (len(its), len(its) - len(answered))
                    assert told.tokens_after == sum(row.tokens_after for row in answered)
                    assert told.cost == sum(float(row.detail.get("cost", 0)) for row in its)
                    assert told.priced == sum("cost" in row.detail for row in its)
                    assert (told.first, told.last) == (min(row.at for row in its), max(row.at for row in its))

    for since in (0.0, 1.0 * DAY, 1.05 * DAY, 2.95 * DAY, 4.0 * DAY, 9.0 * DAY):
        await check(since)
    await either.prune(2.25 * DAY, 5 * DAY)
    for since in (0.0, 2.0 * DAY, 2.5 * DAY, 4.0 * DAY):
        await check(since)
    gone = await either.conversation("tenant-a", "c1")
    assert gone is not None
    assert await either.delete(gone)
    deleted.add("c1")
    for since in (0.0, 3.0 * DAY):
        await check(since)
    await either.prune_usage(3.0 * DAY)
    rows = [row for row in rows if row.at >= 3.0 * DAY]
    await check(0.0)


async def test_what_keys_and_teams_took_is_added_up_once_whatever_becomes_of_conversations(either: Store) -> None:
    keys = {"a" * 32: "one", "b" * 32: "one", "c" * 32: ""}
    rows = []
    for number in range(30):
        key = list(keys)[number % 3]
        row = exchange(number, tenant=key, conversation=f"c{number}", branch=f"b{number}", at=0.4 * DAY * number)
        took = {"usage_prompt": 10 + number, "usage_completion": 5, "reserved": number % 2 == 0}
        rows.append(msgspec.structs.replace(row, key=key, team=keys[key], detail={"cost": 0.5}, **took))
        given = {"id": row.id, "key": key, "team": keys[key], "tokens": 99, "dollars": 9.0, "expires": 2.0**40}
        if took["reserved"]:
            assert (await either.reserve(Reservation(**given), [], at=0.0))[1]
    for some in (rows[:20], rows[10:], rows):  # as where a commit was lost on its way
        await either.record(some)
    limits = [Limit(scope="team", name="one", since=3 * DAY), Limit(scope="key", name="c" * 32, since=0.0)]
    expected = [
        sum(15 + n for n in range(30) if n % 3 < 2 and 0.4 * n >= 3),
        sum(15 + n for n in range(30) if n % 3 == 2),
    ]
    for _ in range(2):
        found = await either.spent(limits, at=0.0)
        assert [use.tokens for use in found] == expected
        assert [use.reserved_tokens for use in found] == [0, 0]
        by_team = await either.usage(None, since=0, by="team")
        assert {row.group: (row.requests, row.cost) for row in by_team} == {"one": (20, 10.0), "": (10, 5.0)}
        by_key = await either.usage("a" * 32, since=0, by="key", key="a" * 32)
        assert [(row.group, row.requests) for row in by_key] == [("a" * 32, 10)]
        await either.prune(2.0**40)
    await either.prune_usage(31 * DAY + 3 * DAY)
    assert [use.tokens for use in await either.spent(limits[:1], at=0.0)] == expected[:1]
    await either.prune_usage(2.0**40)
    assert await either.usage(None, since=0, by="key") == []
