"""Settings and usage: policies, keys, usage, and Weir itself."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, get_args
from urllib.parse import quote

import yaml
from starlette.responses import Response

from proxy.access.admission import LIMITS
from proxy.config.file import ConfigError, dotted, parse_document
from proxy.config.presets import DEFAULT_PRESET, policy_values
from proxy.config.values import masked_url
from proxy.dashboard.pages import attachment
from proxy.dashboard.visit import PATH, PageVisit, Redirect, View
from proxy.errors import InvalidRequest, NotFound
from proxy.features.activity import store_growth
from proxy.features.budgets import list_budgets
from proxy.features.usage import as_csv, beside_cost, usage_page
from proxy.http import admin
from proxy.http.probes import connects
from proxy.http.request import MAX_NAMES, MAX_ROWS, Json
from proxy.store.usage import By

BYS: tuple[By, ...] = tuple(each for each in get_args(By) if each != "key")
"""What is distinguished in addition to keys."""
SINCE = ("24h", "7d", "30d")
LAST_PART = re.compile(r"(\.[^.\[]+|\[\d+\])$")


async def policies(visit: PageVisit) -> View:
    found = await admin.policies(visit.api_request(rows=MAX_ROWS))
    return View("policies.html", {"rows": found["data"], "keys": await _keys_by_policy(visit)})


async def _keys_by_policy(visit: PageVisit) -> Mapping[str, list[str]]:
    by_policy: dict[str, list[str]] = {}
    for row in (
        (await admin.keys(visit.api_request(rows=MAX_ROWS)))["data"] if visit.is_operator else ()
    ):
        if row["revoked"] is None:
            by_policy.setdefault(row["policy"] or visit.runtime.config.default_policy, []).append(
                row["name"]
            )
    return by_policy


async def policy(visit: PageVisit) -> View:
    name = visit.path["name"]
    if visit.is_operator and name not in visit.runtime.config.policies:
        return _edited(visit, name, f"preset: {DEFAULT_PRESET}\n")
    one = await admin.policy(visit.api_request())
    given = visit.runtime.set_policies.get(name)
    text = given.text if given is not None and given.body is not None else _own_text(visit, name)
    return _edited(visit, name, text, one=one, keys=(await _keys_by_policy(visit)).get(name, []))


def _edited(
    visit: PageVisit,
    name: str,
    text: str,
    *,
    one: Json | None = None,
    problems: Sequence[str] = (),
    keys: Sequence[str] = (),
    status: int = 200,
) -> View:
    beside: dict[int, list[str]] = {}
    places = _places(name, text) if problems else {}
    for problem in problems:
        where, _, said = problem.partition(": ")
        beside.setdefault(_line_of(where.removeprefix(f"policies.{name}."), places), []).append(
            said or problem
        )
    rows = [] if one is None else list(_differences(one["policy"], _values(visit, DEFAULT_PRESET)))
    values: dict[str, Any] = {
        "name": name,
        "one": one,
        "rows": rows if visit.query.get("all") else [row for row in rows if row[3]],
        "differing": sum(row[3] for row in rows),
        "text": text,
        "lines": text.splitlines(),
        "beside": beside,
        "keys": keys,
    }
    return View("policy.html", values, status)


def _places(name: str, text: str) -> dict[str, int]:
    with suppress(ConfigError):
        places = parse_document(text, name=name, env={}).places
        lines = ((dotted(at), where.rpartition(":")[2]) for at, where in places.items())
        return {path: int(line) for path, line in lines if line.isdigit()}
    return {}


def _line_of(where: str, places: Mapping[str, int]) -> int:
    """The line that a problem is about: of its path or of what holds it, or that it names itself; 0
    for none.
    """
    number = where.rpartition(":")[2]
    if number.isdigit():
        return int(number)
    while where and where not in places:
        where = LAST_PART.sub("", where) if LAST_PART.search(where) else ""
    return places.get(where, 0)


def _values(visit: PageVisit, name: str) -> Mapping[str, object]:
    return policy_values(visit.runtime.config.policy(name))


def _own_text(visit: PageVisit, name: str) -> str:
    own = _values(visit, name)
    usual = _values(visit, DEFAULT_PRESET)
    said = {key: value for key, value in own.items() if key != "name" and value != usual.get(key)}
    return str(
        yaml.safe_dump({"preset": DEFAULT_PRESET, **said}, sort_keys=False, allow_unicode=True)
    )


def _flat(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def _differences(
    own: Mapping[str, object], usual: Mapping[str, object]
) -> Iterator[tuple[str, str, str, bool]]:
    theirs = dict(_flat(usual))
    ours = dict(_flat(own))
    for key in dict.fromkeys((*ours, *theirs)):
        if key != "name":
            yield (
                key,
                _shown(ours.get(key)),
                _shown(theirs.get(key)),
                ours.get(key) != theirs.get(key),
            )


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


async def save_policy(visit: PageVisit) -> View | Redirect:
    visit.only_operator()
    name = visit.field("name") or visit.path["name"]
    text = visit.field("text").replace("\r\n", "\n")
    request = visit.api_request({"name": name}, body=text.encode())
    try:
        await admin.put_policy(request)
    except InvalidRequest as fault:
        found = (fault.weir or {}).get("problems")
        problems = [str(each) for each in found] if isinstance(found, list) else [fault.message]
        one = None
        with suppress(NotFound):
            one = await admin.policy(visit.api_request({"name": name}))
        return _edited(visit, name, text, one=one, problems=problems, status=400)
    return Redirect(f"{PATH}/policies/{quote(name, safe='')}?done=set-policy")


async def delete_policy(visit: PageVisit) -> Redirect:
    visit.only_operator()
    await admin.delete_policy(visit.api_request())
    return Redirect(f"{PATH}/policies?done=remove-policy")


async def keys(visit: PageVisit, *, status: int = 200, **more: object) -> View:
    visit.only_operator()
    found = await admin.keys(visit.api_request(query={}, rows=MAX_ROWS))
    values: dict[str, Any] = {
        "rows": sorted(
            found["data"],
            key=lambda row: (
                row["revoked"] is not None,
                -(row["last_used"] or row["created"] or 0.0),
            ),
        ),
        "policies": list(visit.runtime.config.policies),
        "permissions": admin.PERMISSIONS,
        "budgets": (await list_budgets(visit.api_request(query={}, rows=MAX_ROWS)))["data"],
        "teams": list(visit.runtime.config.teams),
        "is_open": visit.runtime.keyring.is_open,
        "made": None,
        "problem": None,
        **more,
    }
    return View("keys.html", values, status)


async def create_key(visit: PageVisit) -> View:
    visit.only_operator()
    body: dict[str, object] = {
        "name": visit.field("name"),
        "allow": list(visit.form.get("allow", ())),
    }
    body["models"] = visit.field("models").replace(",", " ").split()
    body |= {name: visit.field(name) for name in LIMITS if visit.field(name)}
    if visit.field("policy"):
        body["policy"] = visit.field("policy")
    if visit.field("team"):
        body["team"] = visit.field("team")
    if visit.field("budgets"):
        body["budgets"] = visit.field("budgets").split()
    try:
        made = await admin.create_key(visit.api_request(body=body))
    except InvalidRequest as fault:
        return await keys(visit, status=400, problem=fault.message)
    return await keys(visit, status=201, made=made)


async def rotate_key(visit: PageVisit) -> View:
    visit.only_operator()
    return await keys(visit, status=201, made=await admin.rotate_key(visit.api_request()))


async def limit_key(visit: PageVisit) -> View | Redirect:
    visit.only_operator()
    try:
        await admin.limit_key(
            visit.api_request(body={name: visit.field(name).strip() or None for name in LIMITS})
        )
    except InvalidRequest as fault:
        return await keys(visit, status=400, problem=fault.message)
    return Redirect(f"{PATH}/keys?done=limit-key")


async def revoke_key(visit: PageVisit) -> Redirect:
    visit.only_operator()
    await admin.revoke_key(visit.api_request())
    return Redirect(f"{PATH}/keys?done=revoke-key")


async def usage(visit: PageVisit) -> View:
    found, by, since = await _usage(visit)
    first = visit.link(cursor=None) if "cursor" in visit.query else None
    csv_link = visit.link(cursor=None).replace(f"{PATH}/usage", f"{PATH}/usage.csv", 1)
    values = {
        "found": found,
        "by": by,
        "since": since,
        "bys": BYS,
        "sinces": SINCE,
        "csv": csv_link,
    }
    values["beside"] = beside_cost(
        unpriced=found["total"]["unpriced"], estimated=found["total"]["estimated"]
    )
    return View("usage.html", values | {"first": first, "next": visit.following(found["next"])})


async def _usage(visit: PageVisit, *, rows: int = 100) -> tuple[Json, str, str]:
    since = visit.query.get("since", "30d")
    query = {"since": since, **visit.given("by", "cursor")}
    return await usage_page(visit.api_request(query=query, rows=rows)), query.get("by", ""), since


async def usage_csv(visit: PageVisit) -> Response:
    found, _, _ = await _usage(visit, rows=MAX_NAMES)
    return attachment(as_csv(found["data"]).encode(), "usage.csv", "text/csv")


async def system(visit: PageVisit) -> View:
    visit.only_operator()
    runtime = visit.runtime
    store = visit.runtime.store
    config = await admin.config(visit.api_request())
    upstreams = list(runtime.config.upstreams.values())
    bases = [each.base_url or each.api_base for each in upstreams]
    up = await asyncio.gather(*(_is_up(base) for base in bases))
    requests = await store.requests()
    size = await store.size()
    kept = await store.sizes()
    values: dict[str, Any] = {
        "version": version("weir-proxy"),
        "instance": runtime.instance,
        "url": masked_url(runtime.config.store.url),
        "store": store,
        "size": size,
        "most": runtime.config.store.max_size,
        "grown": store_growth(kept, size, now=visit.now),
        "sizes": [each for _, each in kept] if kept[1:] else [],
        "since": kept[0][0] if kept else None,
        "per_request": size / requests if requests else None,
        "waiting": runtime.write_queue.waiting(),
        "failing": runtime.write_queue.failing,
        "upstreams": list(zip(upstreams, bases, up, strict=True)),
        "windows": (await admin.windows(visit.api_request(rows=MAX_ROWS)))["data"],
        "config": yaml.safe_dump(config["values"], sort_keys=False, allow_unicode=True),
        "places": config["from"],
        "warnings": config["warnings"],
        "drops": await asyncio.to_thread(_drops, visit),
    }
    return View("system.html", values)


async def _is_up(base: str | None) -> bool:
    return base is None or await connects(base)


DROPS = ("dropped", "undelivered", "degraded")


def _drops(visit: PageVisit) -> list[tuple[str, str]]:
    page, _ = visit.runtime.telemetry.metrics.render()
    lines = (
        line.rpartition(" ") for line in page.decode().splitlines() if not line.startswith("#")
    )
    return [
        (name, f"{float(value):.0f}")
        for name, _, value in lines
        if any(word in name.partition("{")[0] for word in DROPS)
    ]


async def forget(visit: PageVisit) -> Redirect:
    visit.only_operator()
    await admin.forget_window(visit.api_request(body={"scope": visit.field("scope")}))
    return Redirect(f"{PATH}/system?done=forget")
