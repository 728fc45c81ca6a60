"""Current activity: the overview, the conversations, and one of them with its requests and all that
was removed.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from starlette.responses import Response

from policies.limits import BUCKETS, shape_for
from policies.memory.checkpoint import Checkpoint
from proxy.dashboard.charts import Frame, scale, stacked
from proxy.dashboard.visit import PATH, PageVisit, Redirect, Session, Sessions, View
from proxy.errors import ProxyError
from proxy.features.activity import Metric, live_requests, values_of
from proxy.features.audit import conversation_audit
from proxy.features.checkpoints import MARKDOWN, checkpoint_version, list_checkpoints, roll_back
from proxy.features.health_routes import health_of, open_alerts
from proxy.features.notes import add_note, list_notes
from proxy.features.removed import blob, list_removed, pin_removed, search_removed
from proxy.features.usage import beside_cost, taken
from proxy.http import conversations as talks
from proxy.http.conversations import tokens_by_bucket
from proxy.http.request import JSON, ZONES, Json, as_json
from proxy.store.usage import Beside, Figures

PERIODS: Mapping[str, tuple[float, int]] = {
    "1h": (3_600.0, 60),
    "24h": (86_400.0, 900),
    "7d": (604_800.0, 3_600),
}
MOST = 5
NEWEST = 12
SHOWN = 200
READINGS = 100
TABS = ("requests", "removed", "checkpoints", "notes", "health", "audit")
FIELDS = ("name", "model", "policy", "zone", "key", "closed")


async def login(visit: PageVisit) -> View:
    return View("login.html", {"next": visit.query.get("next", ""), "problem": None})


async def sign_in(visit: PageVisit) -> View | Redirect:
    wanted = visit.field("next")
    try:
        session = Sessions(visit.runtime).sign_in(visit.request.scope, visit.field("key").strip())
    except ProxyError as fault:
        return View("login.html", {"problem": fault.message, "next": wanted}, fault.status)
    is_ours = (wanted == PATH or wanted.startswith((f"{PATH}/", f"{PATH}?"))) and wanted.isascii()
    return Redirect(wanted if is_ours and wanted.isprintable() else PATH, session)


async def sign_out(visit: PageVisit) -> Redirect:
    await Sessions(visit.runtime).end(visit.session)
    return Redirect(f"{PATH}/login?out=1", Session.begun("nobody", now=visit.now))


async def guest(visit: PageVisit) -> Redirect:
    return Redirect(PATH, Sessions(visit.runtime).guest())


async def overview(visit: PageVisit) -> View:
    period = visit.query.get("period", "24h")
    length, step = PERIODS.get(period, PERIODS["24h"])
    since = visit.now - length
    tenant = visit.session.reads_as
    store = visit.runtime.store
    rows = await store.figures(tenant, since=since, step=float(step))
    waited = await store.overheads(tenant, since=since)
    full = await store.fullest(tenant, since=since, limit=MOST)
    dear = await store.dearest(tenant, since=since, limit=MOST)
    alerts = await open_alerts(visit.api_request(rows=MOST))
    ever = await store.usage(tenant, since=0.0)
    total = summed(rows)
    values: dict[str, Any] = {
        "period": period if period in PERIODS else "24h",
        "periods": list(PERIODS),
        "step": step,
        "sum": total,
        "beside": beside_cost(unpriced=total["unpriced"] or 0, estimated=total["estimated"] or 0),
        "p50": _at(waited, 0.5),
        "p95": _at(waited, 0.95),
        "fullest": full,
        "dearest": dear,
        "alerts": alerts,
        "ever": taken(ever),
        "begun": min((row.first for row in ever), default=None),
        "newest": await store.passed(tenant, limit=NEWEST, since=since),
        "drawn": _fallbacks(rows, since=since, until=visit.now, step=step),
        "has_any": bool(await store.conversations(tenant, limit=1)),
    }
    return View("overview.html", values)


def summed(rows: Sequence[Figures]) -> dict[str, float | None]:
    names = (
        "requests",
        "failed",
        "refused",
        "healed",
        "degraded",
        "tokens_before",
        "tokens_after",
        "estimated",
    )
    found: dict[str, float | None] = {
        name: sum(getattr(row, name) for row in rows) for name in names
    }
    is_priced = any(row.priced for row in rows)
    cost = sum(row.cost for row in rows)
    saved = sum(row.cost_saved for row in rows)
    prompt = sum(row.prompt for row in rows)
    found["unpriced"] = sum(max(0, row.requests - row.failed - row.priced) for row in rows)
    found["saved"] = sum(row.tokens_before - row.tokens_after for row in rows)
    found["cost"], found["unmanaged"] = (cost, cost + saved) if is_priced else (None, None)
    found["reuse"] = sum(row.cached for row in rows) / prompt if prompt else None
    return found


def _at(ascending: Sequence[float], share: float) -> float | None:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None


def _fallbacks(
    rows: Sequence[Figures], *, since: float, until: float, step: int
) -> list[tuple[str, str, list[float]]]:
    found = []
    drawn = (
        ("Tokens forwarded", "tokens", "tokens_after"),
        ("Managed requests", "requests", "requests"),
    )
    for title, name, metric in drawn:
        _, points = values_of(rows, metric, since=since, until=until, step=step)  # type: ignore[arg-type]
        found.append((title, name, [point["value"] or 0.0 for point in points]))
    return found


async def series(visit: PageVisit) -> Response:
    drawn: Mapping[str, tuple[tuple[Metric, str], ...]] = {
        "tokens": (("tokens_before", "sent by clients"), ("tokens_after", "forwarded")),
        "requests": (("requests", "requests"), ("failed", "failed")),
    }
    length, step = PERIODS.get(visit.query.get("period", ""), PERIODS["24h"])
    lines = drawn.get(visit.query.get("of", ""), drawn["tokens"])
    since = visit.now - length
    rows = await visit.runtime.store.figures(visit.session.reads_as, since=since, step=float(step))
    told = [
        values_of(rows, metric, since=since, until=visit.now, step=step)[1] for metric, _ in lines
    ]
    body = {
        "at": [point["at"] for point in told[0]],
        "lines": [
            {"label": label, "values": [point["value"] for point in points]}
            for (_, label), points in zip(lines, told, strict=True)
        ],
    }
    return as_json(body)


async def live(visit: PageVisit) -> Response:
    return await live_requests(visit.api_request())


async def conversations(visit: PageVisit) -> View:
    found = await talks.listing(visit.api_request({}, visit.given(*FIELDS, "cursor")))
    keys = [(row["tenant"], row["id"]) for row in found["data"]]
    beside = await visit.runtime.store.beside(keys)
    names = visit.runtime.keyring.names
    values: dict[str, Any] = {
        "rows": [
            (row, beside.get(key, Beside())) for row, key in zip(found["data"], keys, strict=True)
        ],
        "next": visit.following(found["next"]),
        "first": visit.link(cursor=None) if "cursor" in visit.query else None,
        "names": names,
        "is_narrowed": bool(visit.given(*FIELDS)),
        "policies": list(visit.runtime.config.policies),
        "zones": ZONES,
        "keys": sorted(set(names.values())) if visit.is_operator else [],
    }
    return View("conversations.html", values)


async def search(visit: PageVisit) -> View:
    query = visit.given("q", "conversation", "cursor")
    found = (
        await search_removed(visit.api_request({}, query, rows=20))
        if query.get("q", "").strip()
        else None
    )
    return View(
        "search.html",
        {
            "found": found,
            "q": query.get("q", ""),
            "next": visit.following(found["next"] if found else None),
        },
    )


async def conversation(visit: PageVisit) -> View:
    tab = visit.query.get("tab", TABS[0])
    tab = tab if tab in TABS else TABS[0]
    one = await talks.one(visit.api_request())
    query = visit.given("cursor") if tab == "requests" else {}
    rows = await talks.timeline(visit.api_request(query=query, rows=SHOWN))
    values: dict[str, Any] = {
        "one": one,
        "out": await visit.runtime.store.count_removed(await visit.api_request().conversation()),
        "tab": tab,
        "tabs": TABS,
        "exchanges": rows["data"][::-1],
        "acted": acted,
        "older": None if rows["next"] is None else visit.link(tab="requests", cursor=rows["next"]),
        "newer": visit.link(cursor=None) if query else None,
        "picture": _picture(visit, one, rows["data"], is_newest=not query),
        "policy": rows["data"][-1]["policy"] if rows["data"] else "",
        "can_search": not visit.is_operator,
    }
    return View("conversation.html", values | await _tab(visit, tab))


async def _tab(visit: PageVisit, tab: str) -> dict[str, Any]:
    request = visit.api_request(query=visit.given("cursor"))
    if tab == "removed":
        found = await list_removed(request)
        by_version: dict[int, list[Json]] = {}
        for row in found["data"]:
            by_version.setdefault(row["version"], []).append(row)
        return {"batches": by_version, "next": visit.following(found["next"])}
    if tab == "checkpoints":
        versions = await list_checkpoints(request)
        return {"versions": versions["data"], "next": visit.following(versions["next"])}
    if tab == "notes":
        return {"notes": (await list_notes(request))["data"][::-1], "next": None}
    if tab == "health":
        health = await health_of(visit.api_request(rows=READINGS))
        measured = [
            (title, is_share, [each[name] for each in health["history"] if each[name] is not None])
            for name, title, is_share in HEALTH
        ]
        return {"health": health, "measured": measured, "next": None}
    if tab == "audit":
        told = await conversation_audit(request)
        return {"audit": told, "next": visit.following(told["next"])}
    return {"next": None}


def _picture(
    visit: PageVisit, one: Json, rows: Sequence[Json], *, is_newest: bool
) -> dict[str, Any] | None:
    if not rows:
        return None
    first = max(1, one["requests"] - len(rows) + 1) if is_newest else 1
    last = rows[-1]
    limit = last["limit"]
    window = int(last["detail"].get("window") or 0) or max(limit, 1)
    trigger = None
    if last["policy"] in visit.runtime.config.policies:
        shape = shape_for(visit.runtime.config.policy(last["policy"]), max(window, limit))
        trigger = int(shape.trigger * limit)
    return timeline_of(rows, first=first, window=max(window, limit), trigger=trigger)


async def rollback(visit: PageVisit) -> Redirect:
    version = visit.field("version")
    await roll_back(visit.api_request({**visit.path, "version": version}))
    return _back(visit, "removed", "rollback")


async def pin(visit: PageVisit) -> Redirect:
    await pin_removed(visit.api_request(body={"ref": visit.field("ref")}))
    return _back(visit, "removed", "pin")


async def compact(visit: PageVisit) -> Redirect:
    await talks.compact(visit.api_request())
    return _back(visit, "requests", "compact")


async def close(visit: PageVisit) -> Redirect:
    await talks.close(visit.api_request())
    return _back(visit, "requests", "close")


async def note(visit: PageVisit) -> Redirect:
    fields = {
        name: visit.field(name) for name in ("text", "category", "importance") if visit.field(name)
    }
    await add_note(visit.api_request(body=fields))
    return _back(visit, "notes", "note")


def _back(visit: PageVisit, tab: str, done: str) -> Redirect:
    return Redirect(f"{visit.page}?tab={tab}&done={done}")


async def checkpoint(visit: PageVisit) -> View | Response:
    saved = await checkpoint_version(visit.api_request())
    text = Checkpoint.from_json(json.dumps(saved["state"])).to_markdown()
    name = f"checkpoint-{saved['version']}"
    if visit.query.get("as") == "md":
        return attachment(text.encode("utf-8", "replace"), f"{name}.md", MARKDOWN)
    if visit.query.get("as") == "json":
        return attachment(
            json.dumps(saved, ensure_ascii=True, indent=2).encode(), f"{name}.json", JSON
        )
    versions = [
        each["version"]
        for each in (await list_checkpoints(visit.api_request(query={}, rows=SHOWN)))["data"]
    ]
    against = visit.query.get("against") or str(
        max((v for v in versions if v < saved["version"]), default="")
    )
    lines: list[tuple[str, str]] = []
    if against.isdigit() and int(against) in versions:
        other = await checkpoint_version(visit.api_request({**visit.path, "version": against}))
        before = Checkpoint.from_json(json.dumps(other["state"])).to_markdown()
        lines = list(difference(before, text))
    values = {
        "saved": saved,
        "text": text,
        "versions": versions,
        "against": against,
        "lines": lines,
    }
    return View("checkpoint.html", values)


def difference(before: str, after: str) -> Sequence[tuple[str, str]]:
    """The lines of two texts, each with ``+``, ``-`` or a space before it; far from a change they
    are left out.
    """
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    shown = (line for line in lines if not line.startswith(("---", "+++")))
    return [(line[:1], line[1:] if line[:1] in "+- " else line) for line in shown]


def attachment(body: bytes, name: str, kind: str) -> Response:
    return Response(
        body, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


async def original(visit: PageVisit) -> View:
    ref = visit.path["ref"]
    cursor = visit.query.get("cursor", "0")
    answer = await blob(
        visit.api_request({"ref": f"{ref.removesuffix('.txt')}.txt"}, {"cursor": cursor})
    )
    told = answer.headers
    values = {
        "ref": ref,
        "text": bytes(answer.body).decode("utf-8", "replace"),
        "size": int(told["x-weir-size"]),
        "start": int(cursor),
        "next": visit.following(told.get("x-weir-cursor")),
    }
    return View("original.html", values)


HEIGHT = 280


def timeline_of(
    rows: Sequence[Json], *, first: int, window: int, trigger: int | None
) -> dict[str, Any]:
    """Buckets of every forwarded request against the window, the client's own size above them,
    marks where Weir acted.

    ``first`` is the number of its oldest request that is shown.
    """
    buckets = [tokens_by_bucket(row["detail"].get("buckets")) for row in rows]
    totals = [
        max(row["tokens_after"], sum(each.values()))
        for row, each in zip(rows, buckets, strict=True)
    ]
    sent = [row["tokens_before"] for row in rows]
    ticks = scale(max([window, *totals, *sent]) * 1.02)
    frame = Frame(len(rows), ticks[-1], HEIGHT)
    starts = [
        0,
        *(n + 1 for n, (a, b) in enumerate(pairwise(rows)) if a["zone"] != b["zone"]),
        len(rows),
    ]
    return {
        "frame": frame,
        "ticks": ticks,
        "first": first,
        "rows": rows,
        "zones": [(rows[begin]["zone"], begin, end) for begin, end in pairwise(starts)],
        "stacked": list(stacked(frame, BUCKETS, buckets)),
        "sent": frame.line(sent),
        "window": window,
        "usable": rows[-1]["limit"],
        "trigger": trigger,
    }


def acted(row: Json) -> bool:
    return any(layer["kept"] for layer in row["layers"])


HEALTH = (
    ("utilization", "Utilization", True),
    ("tool_result_bloat", "Tool results, share of the request", True),
    ("burn_rate", "Tokens a request", False),
    ("eviction_rate", "Evictions a request", False),
    ("compression_ratio", "Compression, times", False),
    ("fidelity_score", "Fidelity", True),
)
"""The health metrics that are drawn: name, title, whether it is a share."""


def thousands(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
