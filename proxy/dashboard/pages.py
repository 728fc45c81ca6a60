"""What is going on: the overview, the conversations, and one of them with its requests and all that was removed."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from policies.limits import shape_for
from policies.memory.checkpoint import Checkpoint
from proxy.dashboard import charts
from proxy.dashboard.visit import PATH, PageVisit, Redirect, Sessions, View
from proxy.http import archive, reports
from proxy.http import conversations as talks
from proxy.http.request import JSON, ZONES, Exchange, ManagementAnswer
from proxy.store.conversations import Beside
from proxy.store.exchanges import Figures

PERIODS: Mapping[str, tuple[float, int]] = {"1h": (3_600.0, 60), "24h": (86_400.0, 900), "7d": (604_800.0, 3_600)}
MOST = 5
NEWEST = 12
SHOWN = 200
READINGS = 100
MAX_SAME = 600
MAX_OTHER = 4_000
"""Characters of a message that are shown without being asked for."""
WORDS = re.compile(r"\s+|[^\s]+")
TABS = ("requests", "removed", "checkpoints", "notes", "health", "audit")
FIELDS = ("name", "model", "policy", "zone", "key", "closed")


async def login(visit: PageVisit) -> View:
    return View("login.html", {"next": visit.query.get("next", ""), "problem": None})


async def guest(visit: PageVisit) -> Redirect:
    return Redirect(PATH, Sessions(visit.runtime).guest())


async def overview(visit: PageVisit) -> View:
    period = visit.query.get("period", "24h")
    length, step = PERIODS.get(period, PERIODS["24h"])
    since, tenant, store = visit.now - length, visit.session.reads_as, visit.runtime.store
    rows = await store.figures(tenant, since=since, step=float(step))
    waited = await store.overheads(tenant, since=since)
    full = await store.fullest(tenant, since=since, limit=MOST)
    dear = await store.dearest(tenant, since=since, limit=MOST)
    alerts = await reports.health(visit.asked(rows=MOST))
    values: dict[str, Any] = {
        "period": period if period in PERIODS else "24h",
        "periods": list(PERIODS),
        "step": step,
        "sum": summed(rows),
        "p50": _at(waited, 0.5),
        "p95": _at(waited, 0.95),
        "fullest": full,
        "dearest": dear,
        "alerts": alerts,
        "newest": await store.passed(tenant, limit=NEWEST, since=since),
        "charts": _fallbacks(rows, since=since, until=visit.now, step=step),
        "has_any": bool(await store.conversations(tenant, limit=1)),
    }
    return View("overview.html", values)


def summed(rows: Sequence[Figures]) -> dict[str, float | None]:
    names = ("requests", "failed", "refused", "healed", "degraded", "tokens_before", "tokens_after")
    found: dict[str, float | None] = {name: sum(getattr(row, name) for row in rows) for name in names}
    is_priced = any(row.priced for row in rows)
    cost, saved = sum(row.cost for row in rows), sum(row.cost_saved for row in rows)
    prompt = sum(row.prompt for row in rows)
    found["saved"] = sum(row.tokens_before - row.tokens_after for row in rows)
    found["cost"], found["unmanaged"] = (cost, cost + saved) if is_priced else (None, None)
    found["reuse"] = sum(row.cached for row in rows) / prompt if prompt else None
    return found


def _at(ascending: Sequence[float], share: float) -> float | None:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None


def _fallbacks(rows: Sequence[Figures], *, since: float, until: float, step: int) -> list[tuple[str, str, Markup]]:
    found = []
    for title, name, metric in (("Tokens forwarded", "tokens", "tokens_after"), ("Requests", "requests", "requests")):
        _, points = reports.values_of(rows, metric, since=since, until=until, step=step)  # type: ignore[arg-type]
        picture = charts.spark([point.value or 0.0 for point in points], title, filled=True)
        found.append((title, name, Markup(picture)))  # noqa: S704 - drawn of numbers
    return found


async def series(visit: PageVisit) -> ManagementAnswer:
    drawn: Mapping[str, tuple[tuple[reports.Metric, str], ...]] = {
        "tokens": (("tokens_before", "sent by clients"), ("tokens_after", "forwarded")),
        "requests": (("requests", "requests"), ("failed", "failed")),
    }
    length, step = PERIODS.get(visit.query.get("period", ""), PERIODS["24h"])
    lines = drawn.get(visit.query.get("of", ""), drawn["tokens"])
    since = visit.now - length
    rows = await visit.runtime.store.figures(visit.session.reads_as, since=since, step=float(step))
    told = [reports.values_of(rows, metric, since=since, until=visit.now, step=step)[1] for metric, _ in lines]
    body = {
        "at": [point.at for point in told[0]],
        "lines": [
            {"label": label, "values": [point.value for point in points]}
            for (_, label), points in zip(lines, told, strict=True)
        ],
    }
    return ManagementAnswer(json.dumps(body).encode(), kind=JSON)


async def live(visit: PageVisit) -> ManagementAnswer:
    return await reports.live(visit.asked())


async def conversations(visit: PageVisit) -> View:
    found = await talks.listing(visit.asked({}, visit.given(*FIELDS, "cursor")))
    keys = [(row.tenant, row.id) for row in found.data]
    beside = await visit.runtime.store.beside(keys)
    names = visit.runtime.keyring.names
    values: dict[str, Any] = {
        "rows": [(row, beside.get(key, Beside())) for row, key in zip(found.data, keys, strict=True)],
        "next": visit.following(found.next),
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
    found = await archive.search(visit.asked({}, query, rows=20)) if query.get("q", "").strip() else None
    return View(
        "search.html", {"found": found, "q": query.get("q", ""), "next": visit.following(found.next if found else None)}
    )


async def conversation(visit: PageVisit) -> View:
    tab = visit.query.get("tab", TABS[0])
    tab = tab if tab in TABS else TABS[0]
    one = await talks.one(visit.asked())
    query = visit.given("cursor") if tab == "requests" else {}
    rows = await talks.timeline(visit.asked(query=query, rows=SHOWN))
    values: dict[str, Any] = {
        "one": one,
        "tab": tab,
        "tabs": TABS,
        "exchanges": rows.data[::-1],
        "acted": charts.acted,
        "older": None if rows.next is None else visit.link(tab="requests", cursor=rows.next),
        "newer": visit.link(cursor=None) if query else None,
        "picture": _picture(visit, one, rows.data, is_newest=not query),
        "policy": rows.data[-1].policy if rows.data else "",
        "can_search": not visit.is_operator,
    }
    return View("conversation.html", values | await _tab(visit, tab))


async def _tab(visit: PageVisit, tab: str) -> dict[str, Any]:
    asked = visit.asked(query=visit.given("cursor"))
    if tab == "removed":
        found = await archive.removed(asked)
        by_version: dict[int, list[archive.Removed]] = {}
        for row in found.data:
            by_version.setdefault(row.version, []).append(row)
        return {"batches": by_version, "next": visit.following(found.next)}
    if tab == "checkpoints":
        versions = await archive.checkpoints(asked)
        return {"versions": versions.data, "next": visit.following(versions.next)}
    if tab == "notes":
        return {"notes": (await talks.notes(asked)).data[::-1], "next": None}
    if tab == "health":
        health = await reports.health_of(visit.asked(rows=READINGS))
        pictures = [(title, newest, Markup(svg)) for title, newest, svg in charts.health_charts(health.history)]  # noqa: S704
        return {"health": health, "pictures": pictures, "next": None}
    if tab == "audit":
        told = await reports.conversation_audit(asked)
        return {"audit": told, "next": visit.following(told.next)}
    return {"next": None}


def _picture(
    visit: PageVisit, one: talks.ConversationStatus, rows: Sequence[Exchange], *, is_newest: bool
) -> Markup | None:
    if not rows:
        return None
    first = max(1, one.requests - len(rows) + 1) if is_newest else 1
    last = rows[-1]
    window = int(last.detail.get("window") or 0) or max(last.limit, 1)
    trigger = None
    if last.policy in visit.runtime.config.policies:
        shape = shape_for(visit.runtime.config.policy(last.policy), max(window, last.limit))
        trigger = int(shape.trigger * last.limit)
    drawn = charts.timeline_chart(rows, first=first, window=max(window, last.limit), trigger=trigger, page=visit.page)
    return Markup(drawn)  # noqa: S704 - every text in it is escaped where it is drawn


async def rollback(visit: PageVisit) -> Redirect:
    version = visit.field("version")
    done = await archive.rollback(visit.asked({**visit.path, "version": version}))
    return _back(visit, "removed", f"Rolled back: the conversation is at version {done.version}.")


async def pin(visit: PageVisit) -> Redirect:
    done = await archive.pin(visit.asked(body={"ref": visit.field("ref")}))
    return _back(visit, "removed", f"Pinned {done.pinned}: it comes back with the next request, and stays.")


async def compact(visit: PageVisit) -> Redirect:
    await talks.compact(visit.asked())
    return _back(visit, "requests", "The next request is compacted, whatever its size.")


async def close(visit: PageVisit) -> Redirect:
    await talks.close(visit.asked())
    return _back(visit, "requests", "Closed. A request that continues it opens it again.")


async def note(visit: PageVisit) -> Redirect:
    fields = {name: visit.field(name) for name in ("text", "category", "importance") if visit.field(name)}
    await talks.add_note(visit.asked(body=fields))
    return _back(visit, "notes", "Noted.")


def _back(visit: PageVisit, tab: str, said: str) -> Redirect:
    return Redirect(f"{visit.page}?tab={tab}&done={quote(said)}")


async def checkpoint(visit: PageVisit) -> View | ManagementAnswer:
    saved = await archive.checkpoint_version(visit.asked())
    text = Checkpoint.from_json(json.dumps(saved.state)).to_markdown()
    name = f"checkpoint-{saved.version}"
    if visit.query.get("as") == "md":
        return _file(text.encode("utf-8", "replace"), f"{name}.md", archive.MARKDOWN)
    if visit.query.get("as") == "json":
        return _file(json.dumps(saved.plain(), ensure_ascii=True, indent=2).encode(), f"{name}.json", JSON)
    versions = [each.version for each in (await archive.checkpoints(visit.asked(query={}, rows=SHOWN))).data]
    against = visit.query.get("against") or str(max((v for v in versions if v < saved.version), default=""))
    lines: list[tuple[str, str]] = []
    if against.isdigit() and int(against) in versions:
        other = await archive.checkpoint_version(visit.asked({**visit.path, "version": against}))
        before = Checkpoint.from_json(json.dumps(other.state)).to_markdown()
        lines = list(difference(before, text))
    values = {"saved": saved, "text": text, "versions": versions, "against": against, "lines": lines}
    return View("checkpoint.html", values)


def difference(before: str, after: str) -> Sequence[tuple[str, str]]:
    """The lines of two texts, each with ``+``, ``-`` or a space before it; far from a change they are left out."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    shown = (line for line in lines if not line.startswith(("---", "+++")))
    return [(line[:1], line[1:] if line[:1] in "+- " else line) for line in shown]


def _file(body: bytes, name: str, kind: bytes) -> ManagementAnswer:
    named = f'attachment; filename="{name}"'.encode()
    return ManagementAnswer(body, kind=kind, headers=[(b"content-disposition", named)])


async def request(visit: PageVisit) -> View:
    one = await talks.one(visit.asked())
    both = await archive.both_sides(visit.asked())
    values: dict[str, Any] = {
        "one": one,
        "both": both,
        "layers": charts.layers_of(both.exchange),
        "runs": archive.runs(archive.aligned(both)),
    }
    return View("request.html", values)


def cut(row: archive.SideRow, visit: PageVisit) -> str:
    text = row.text if isinstance(row.text, str) else ""
    most = MAX_SAME if row.status == "same" else MAX_OTHER
    return text if visit.query.get("full") == str(row.place) else text[:most]


def is_cut(row: archive.SideRow, visit: PageVisit) -> bool:
    return isinstance(row.text, str) and len(cut(row, visit)) < len(row.text)


def marked(pair: archive.Pair, side: str) -> Markup:
    before, after = (row.text if row is not None else None for row in (pair.client, pair.model))
    if not isinstance(before, str) or not isinstance(after, str):
        return Markup('<p class="soft">Not kept.</p>')
    own, other = (before, after) if side == "client" else (after, before)
    frame = Markup("<del>{}</del>") if side == "client" else Markup("<ins>{}</ins>")
    parts = (WORDS.findall(text[:MAX_OTHER]) for text in (own, other))
    pieces = list[Markup]()
    mine, theirs = parts
    for what, start, stop, _, _ in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        text = escape("".join(mine[start:stop]))
        pieces.append(text if what == "equal" or not text else frame.format(text))
    more = Markup(' <span class="soft">and {} more characters</span>').format(f"{len(own) - MAX_OTHER:,}")
    pieces += [more] if len(own) > MAX_OTHER else []
    return Markup('<pre class="text" dir="auto">{}</pre>').format(Markup("").join(pieces))


async def original(visit: PageVisit) -> View:
    ref, cursor = visit.path["ref"], visit.query.get("cursor", "0")
    answer = await archive.blob(visit.asked({"ref": f"{ref.removesuffix('.txt')}.txt"}, {"cursor": cursor}))
    told = {name.decode(): value.decode() for name, value in answer.headers}
    values = {
        "ref": ref,
        "text": answer.body.decode("utf-8", "replace"),
        "size": int(told["x-weir-size"]),
        "start": int(cursor),
        "next": visit.following(told.get("x-weir-cursor")),
    }
    return View("original.html", values)
