"""Recorded conversations replayed turn by turn, and what is due of them, worked out from what was sent in plain loops."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from policies.health import Snapshot
from proxy.store.chain import AuditRow, AuditType
from proxy.store.records import AlertRow
from tests.functional.harness import COUNTER, RunningWeir
from tests.upstream.app import RunningSimulator

Array = list[dict[str, Any]]
SHIPPED = {
    "airline": Path(__file__).parents[1] / "real" / "data" / "airline.jsonl",
    "demo": Path(str(files("proxy.cli").joinpath("data", "recorded_run.jsonl"))),
}
SHARED = Path(__file__).parents[3] / "shared" / "data"
MAX_TOKENS = 256
KINDS = ("overflow", "utilization", "eviction_rate", "compression_ratio", "tool_bloat", "thrash", "burn_rate", "loop")


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded conversation."""

    name: str
    messages: Array

    def requests(self) -> Iterator[Array]:
        """What its client sent, turn by turn: the history up to each answer."""
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant" and index and self.messages[index - 1]["role"] != "assistant":
                yield self.messages[:index]


def sessions(path: Path, *, most: int | None = None) -> list[Session]:
    """The conversations of a file of recordings."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:most]
    return [Session(str(row.get("meta", {}).get("id", n)), row["messages"]) for n, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Request:
    """One replayed request: its id, its messages, and what its answer's headers said of tokens."""

    id: str
    messages: Array
    before: int
    after: int
    limit: int


@dataclass(slots=True)
class Replayed:
    """A replayed conversation with what Weir remembers of it, oldest first.

    ``holds`` are the tokens of the window less those of the answer.
    """

    holds: int
    requests: list[Request] = field(default_factory=list)
    bodies: list[Array] = field(default_factory=list)
    at: dict[str, float] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    alerts: list[AlertRow] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)

    def facts(self, kind: AuditType) -> dict[str, dict[str, Any]]:
        """What the audit says under one type, by request."""
        return {row.request: json.loads(row.facts) for row in self.audit if row.type == kind}

    def episodes(self, kind: str) -> list[tuple[int, int | None]]:
        """The alerts of a kind as numbers of the requests at which they opened and closed, None for open."""
        number = {self.at[request.id]: n for n, request in enumerate(self.requests)}
        found = [a for a in self.alerts if a.kind == kind]
        return sorted((number[a.at], None if a.closed is None else number[a.closed]) for a in found)


async def replay(
    session: Session, target: RunningWeir, simulator: RunningSimulator, *, name: str, window: int
) -> Replayed:
    """The conversation sent through a Weir, every request behind the one before.

    Without tool definitions, so that what Weir estimates is what the simulator counts and no growth is a correction.
    """
    client = target.client(default_headers={"x-weir-conversation": name})
    result, sent = Replayed(window - MAX_TOKENS), len(simulator.answered())
    for messages in session.requests():
        raw = await client.chat.completions.with_raw_response.create(
            model="sim", messages=messages, max_tokens=MAX_TOKENS
        )
        raw.parse()
        tokens = dict(pair.split("=") for pair in raw.headers["x-weir-tokens"].split(";"))
        figures = {key: int(value) for key, value in tokens.items()}
        result.requests.append(Request("", messages, **figures))
    result.bodies = [json.loads(seen.body)["messages"] for seen in simulator.answered()[sent:]]
    await target.stored()
    store = target.runtime.store
    assert store is not None
    row = await store.conversation(None, name)
    assert row is not None
    timeline = await store.timeline(row, limit=10_000)
    result.requests = [replace(request, id=each.id) for request, each in zip(result.requests, timeline, strict=True)]
    result.at = {each.id: each.at for each in timeline}
    result.snapshots = await store.snapshots(row, limit=10_000)
    result.alerts = await store.alerts(row, limit=10_000)
    result.audit = (await store.audit(row.tenant, conversation=row.id, limit=100_000))[::-1]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics after one request, worked out here."""

    utilization: float
    evicted: int
    ratios: tuple[float, ...]
    compacted: bool
    growth: int | None
    bloat: float
    repeats: int
    left: float | None


def metrics_of(replayed: Replayed) -> list[Metrics]:
    """Every request's own figures: of its headers, of its body, of the recorded messages and of the audit."""
    evictions, cuts = replayed.facts(AuditType.EVICTION), replayed.facts(AuditType.COMPACTION)
    found: list[Metrics] = []
    growths: list[int] = []
    for number, (request, body) in enumerate(zip(replayed.requests, replayed.bodies, strict=True)):
        evicted, cut = evictions.get(request.id, {}), cuts.get(request.id, {})
        growth = None if not number else request.before - replayed.requests[number - 1].before
        growths += [] if growth is None else [growth]
        velocity = sum(growths[-5:]) / len(growths[-5:]) if growths else None
        room = replayed.holds - request.after
        ratios = [(each["original_tokens"], each["compressed_tokens"]) for each in evicted.get("condensed", ())]
        ratios += [(cut["original_tokens"], cut["compressed_tokens"])] if cut else []
        found.append(
            Metrics(
                utilization=request.after / request.limit,
                evicted=evicted.get("count", 0),
                ratios=tuple(before / after for before, after in ratios),
                compacted=bool(cut),
                growth=growth,
                bloat=sum(map(tokens_of, (m for m in body if m["role"] == "tool"))) / request.after,
                repeats=repeats_in(request.messages),
                left=0.0 if room < 0 else room / velocity if velocity else None,
            )
        )
    return found


def tokens_of(message: Mapping[str, Any]) -> int:
    """The tokens of a message that says something, by the simulator's own count."""
    return counted(str(message.get("content") or "")) + 4


@functools.cache
def counted(text: str) -> int:
    """Every request has the messages of the one before again."""
    return COUNTER.count(text)


def repeats_in(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many steps in a row, since the user last spoke, ended with the same call as the newest."""
    runs: dict[tuple[str, str], int] = {}
    for message in messages:
        if message["role"] == "user":
            runs = {}
        calls = message.get("tool_calls") or ()
        if calls:
            made = [
                (c["function"]["name"], json.dumps(loaded(c["function"]["arguments"]), sort_keys=True)) for c in calls
            ]
            runs = {call: runs.get(call, 0) + made.count(call) for call in made}
    return max(runs.values(), default=0)


def loaded(text: str) -> Any:
    """The JSON in a text, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def due(metrics: Sequence[Metrics], rules: Mapping[str, float], *, manages: bool) -> dict[str, list[bool]]:
    """Which alert holds at which request, by the thresholds of the article; ``rules`` are those that are others."""
    at = {
        "utilization": 0.90, "eviction": 5.0, "ratio": 2.0, "bloat": 0.30, "loop": 3, "thrash": 3, "left": 2.0,
        "spike": 3.0, "spike_share": 0.05, **rules,
    }  # fmt: skip
    ratios: list[float] = []
    compactions: list[int] = []
    left = 0.0
    baseline: float | None = None
    held: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for number, now in enumerate(metrics):
        newest = metrics[: number + 1]
        last3, last5 = newest[-3:], newest[-5:]
        ratios += now.ratios
        counts = [each.evicted for each in last5]
        held["utilization"].append(len(last3) == 3 and all(m.utilization > at["utilization"] for m in last3))
        sustained = len(counts) == 5 and sum(counts) / 5 > at["eviction"] and sum(counts) - max(counts) > at["eviction"]
        held["eviction_rate"].append(sustained)
        held["compression_ratio"].append(len(ratios) >= 3 and max(ratios[-3:]) < at["ratio"])
        held["tool_bloat"].append(not manages and now.utilization >= 0.5 and now.bloat > at["bloat"])
        if now.compacted:
            before = metrics[number - 1].utilization + (now.growth or 0) / at["base"]
            compactions += [number] * (before - left < 0.15)
            left = now.utilization
        held["thrash"].append(sum(each > number - 20 for each in compactions) >= at["thrash"])
        held["loop"].append(now.repeats >= at["loop"])
        held["overflow"].append(not manages and now.left is not None and now.left <= at["left"])
        spiked = now.growth is not None and baseline is not None and now.growth > at["spike"] * baseline
        held["burn_rate"].append(spiked and (now.growth or 0) / at["base"] >= at["spike_share"])
        if now.growth is not None:
            baseline = now.growth if baseline is None else 0.3 * now.growth + 0.7 * baseline
    return held


EASED = {"utilization": 0.9, "eviction": 0.9, "bloat": 0.9, "ratio": 1.1, "left": 1.1}
"""By how much of its limit a rule goes on to hold."""


def eased(rules: Mapping[str, float]) -> dict[str, float]:
    """The thresholds below which what holds ceases to."""
    at = {"utilization": 0.90, "eviction": 5.0, "ratio": 2.0, "bloat": 0.30, "left": 2.0, **rules}
    return {name: value * EASED.get(name, 1.0) for name, value in at.items()}


def episodes_in(begins: Sequence[bool], lasts: Sequence[bool], *, again_after: int) -> list[tuple[int, int | None]]:
    """Where a rule begins to hold, so many requests after it ceased to at the soonest, and where it ceases to."""
    found: list[tuple[int, int | None]] = []
    for number, (may_begin, goes_on) in enumerate(zip(begins, lasts, strict=True)):
        is_open = bool(found) and found[-1][1] is None
        if is_open and not goes_on:
            found[-1] = (found[-1][0], number)
        elif not is_open and may_begin and (not found or number >= (found[-1][1] or 0) + again_after):
            found.append((number, None))
    return found
