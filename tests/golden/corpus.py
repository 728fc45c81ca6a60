"""What is played: sessions, policies, windows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from policies.ledger import ConversationState
from policies.memory.state import state_of
from policies.settings import ContextSettings, Layer
from policies.tokens import CHARS4
from proxy.config.file import Document
from proxy.config.presets import policy_from, preset_documents, preset_policies
from proxy.features.replay.script import Recording, Script, read_recordings, recording_of
from tests.golden.driver import Play
from tests.golden.workshop import session

TESTS = Path(__file__).parents[1]
SHARED = Path(__file__).parents[3] / "shared" / "data"
SHIPPED = {
    "demo": Path(str(files("proxy.cli").joinpath("data", "recorded_run.jsonl"))),
    "airline": TESTS / "real" / "data" / "airline.jsonl",
    "canary": TESTS / "policies" / "data" / "canary_sessions.jsonl",
}
MODES = ("plain", "asked", "prepared")
SETTINGS: Mapping[str, Callable[[ContextSettings], ContextSettings]] = {
    "plain": lambda settings: settings,
    "asked": lambda s: replace(s, summarizer="model", summaries=replace(s.summaries, wait=20.0)),
    "prepared": lambda s: replace(s, summarizer="same"),
}
SHORT_CASCADE = [{"layer": "compact"}]
OWN: Mapping[str, Mapping[str, Any]] = {
    "retire": {
        "preempt": True,
        "cold_at": 0.5,
        "cascade": [
            {"layer": "media", "at": 0.4, "min_savings": 0, "params": {"keep": 1}},
            {"layer": "reasoning", "at": 0.4, "min_savings": 0, "params": {"ttl": 3}},
            {"layer": "semantic_merge", "at": 0.45, "params": {"threshold": 0.6}},
            {"layer": "evict", "at": 0.55},
            *SHORT_CASCADE,
        ],
    },
    "prune": {
        "placeholder": "marker",
        "cascade": [
            {"layer": "prune", "at": 0.5, "params": {"protect": 1500, "minimum": 400, "skip_turns": 1}},
            {"layer": "truncate_largest", "at": 0.6, "params": {"floor": 90}},
            {"layer": "drop_oldest", "at": 0.8, "params": {"recent": 4, "fraction": 0.2}},
        ],
    },
    "buckets": {
        "enforce": "bucket",
        "auto_scale": True,
        "preempt": True,
        "memory": ["<memory>", "memory"],
        "buckets": {
            "system": {"cap": 0.1},
            "tools": {"cap": 0.06, "on_overflow": "prune-unused"},
            "tool_outputs": {"cap": 0.3, "on_overflow": "truncate"},
            "history": {"cap": 0.3, "on_overflow": "summarize"},
            "summary": {"charge_to": "history"},
            "memory": {"cap": 0.05, "on_overflow": "warn"},
        },
        "cascade": [{"layer": "ingest_cap", "at": 0}, *SHORT_CASCADE],
    },
    "refuse": {
        "enforce": "bucket",
        "buckets": {
            "tool_outputs": {"cap": 0.3, "on_overflow": "reject"},
            "history": {"cap": 0.2, "on_overflow": "truncate"},
        },
        "cascade": [{"layer": "window", "at": 0.5, "params": {"messages": 10, "note": True}}],
    },
    "ingest": {
        "ingest": {
            "cap": 900,
            "from_start": True,
            "method": "head",
            "tools": {"run": 200},
            "sub_agents": {"research": 300},
            "drop_fields": {"*": ["debug"], "fetch": ["trace", "page"]},
            "include": {"fetch": ["page"]},
        },
        "cascade": [
            {"layer": "ingest_cap"},
            {"layer": "delegate", "at": 0.4, "params": {"least": 200, "max_tokens": 150}},
            {"layer": "summarize_tool_result", "at": 0.5, "params": {"over": 120, "keep_newest": 2}},
            {"layer": "progressive", "at": 0.6},
            *SHORT_CASCADE,
        ],
    },
    "rollover": {
        "resume": "auto",
        "cascade": [{"layer": "rollover", "at": 0.6}],
        "notes": {"extract_from": 6},
    },
    "custom": {"cascade": [{"layer": "window", "at": 0.7, "params": {"turns": 3, "note": True}}]},
    "reach": {
        "cascade": [
            {"layer": "dedupe", "at": 0.4, "min_savings": 0.01},
            {"layer": "evict", "must_reach": 0.5},
            {"layer": "compact", "params": {"keep_turns": 2, "prompt": "plain"}},
        ]
    },
    "nobody": {"compaction": "off", "cascade": [{"layer": "dedupe"}, *SHORT_CASCADE]},
}
SCORERS: Mapping[str, Mapping[str, Any]] = {
    "fifo": {},
    "lru": {"half_life": 3},
    "priority": {"types": ["user", "tool_result", "memory"]},
    "type_based": {"ttl_tool_result": 12, "protect_steps": 3},
    "hybrid": {"weights": "article-code"},
    "largest": {},
}


@cache
def policies() -> dict[str, ContextSettings]:
    """The presets, and policies that take every other path."""
    scored = {
        f"scored-{name}": {
            "placeholder": "none" if name == "lru" else "finding",
            "cascade": [{"layer": "evict", "at": 0.55, "stop_at": 0.4, "params": {"scorer": name, **params}}],
        }
        for name, params in SCORERS.items()
    }
    documents = preset_documents()
    found = {
        name: policy_from(name, Document(name="", data=data), presets=documents)
        for name, data in {**OWN, **scored}.items()
    }
    # in a file its function would be imported by a process of its own, which takes seconds
    layer = Layer(strategy="custom", at=0.5, params={"path": "textwrap:wrap"})
    found["custom"] = replace(found["custom"], layers=(layer, *found["custom"].layers))
    return {**preset_policies(), **found}


@dataclass(frozen=True)
class Case:
    """One session under one policy in one window; ``events`` are ``fails`` (no model answers) and ``resumes``."""

    session: str
    policy: str
    window: int
    mode: str
    events: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """What its digests stand under."""
        return "/".join((self.session, self.policy, str(self.window), self.mode, *sorted(self.events)))

    def play(self) -> Play:
        """The session played."""
        settings = SETTINGS[self.mode](policies()[self.policy])
        resumed = state_elsewhere() if "resumes" in self.events else None
        eventful, fails = self.mode != "plain", "fails" in self.events
        return Play(script(self.session), settings, self.window, eventful=eventful, fails=fails, resumed=resumed).go()


@cache
def script(name: str) -> Script:
    """A session, read: of the repository's by its name, of a shared set by the set's name and its number."""
    return Script(_recording(name), counter=CHARS4, model="sim")


def _recording(name: str) -> Recording:
    if name in SHIPPED:
        return next(iter(read_recordings(SHIPPED[name]))).recording
    kind, _, number = name.rpartition("-")
    if kind == "workshop":
        row = session(seed=int(number))
        return recording_of(row["messages"], name=name, tools=row["tools"])
    return next(islice(read_recordings(SHARED / f"{kind}.jsonl"), int(number), None)).recording


@cache
def state_elsewhere() -> str:
    """What another conversation left, as JSON text."""
    airline = script("airline")
    transcript = airline.transcript(len(airline.messages))
    return state_of(transcript, known=ConversationState(), counter=CHARS4).to_json()


def shipped() -> Iterator[Case]:
    """What the ordinary suite plays: sessions of the repository, so chosen that every path is taken."""
    for n, policy in enumerate(preset_policies()):
        if n % 2:
            yield Case("demo", policy, 9_000, MODES[(n + 2) % 3])
        else:
            yield Case("workshop-5", policy, 12_000, MODES[n % 3])
        if n % 3 == 0:
            yield Case("airline", policy, 6_000, MODES[(n // 3) % 3])
    for n, policy in enumerate(p for p in policies() if p not in preset_policies()):
        yield Case("workshop-5", policy, 12_000, MODES[1 + n % 2] if n % 5 else "plain")
    yield from TIGHT


def soak() -> Iterator[Case]:
    """Sessions of the repository under every policy."""
    for n, policy in enumerate(policies()):
        yield Case("workshop-6", policy, (20_000, 9_000, 14_000)[n % 3], MODES[n // 3 % 3])
        yield Case("airline", policy, (3_000, 5_000, 8_192)[n % 3], MODES[(n // 3 + 1) % 3])


def shared() -> Iterator[Case]:
    """The data sets beside the repository, some of their sessions under every preset."""
    for n, policy in enumerate(preset_policies()):
        mode, other = MODES[n % 3], MODES[(n + 1) % 3]
        yield Case(f"tau_airline_long-{n % 4}", policy, 12_000, mode)
        yield Case(f"{('swe_agent', 'side_constraints')[n % 2]}-{n % 9}", policy, 4_096, other)


TIGHT = (
    Case("workshop-5", "ingest", 12_000, "asked", frozenset({"fails"})),
    Case("airline", "rollover", 6_000, "asked", frozenset({"resumes"})),
    Case("workshop-5", "prune", 3_500, "asked"),
    Case("workshop-5", "balanced", 2_500, "asked"),
    Case("airline", "balanced", 3_500, "prepared"),
)
SETS: Mapping[str, Callable[[], Iterator[Case]]] = {"shipped": shipped, "soak": soak, "shared": shared}
