"""Plays a recorded conversation through the planner as a served one: with time, trend, retries, overflow, preparation.

Only what the shell uses as well is used, so that what stands behind it may be rebuilt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeVar

from policies.effects import (
    Alike,
    Answers,
    Compare,
    Done,
    Effect,
    Failed,
    Flow,
    Kept,
    Offload,
    Reply,
    Save,
    StateSaved,
    Summarize,
    Summary,
    Together,
    Trim,
    Trimmed,
)
from policies.ledger import ConversationState, Decision, Edit, EditKind, Trend
from policies.limits import BudgetUnreachable, divide, limits_for
from policies.memory.state import milestone_of, notes_of, state_of, wants_notes, write_notes
from policies.messages import PolicyError, ToolDefinition, Tools, Transcript
from policies.planner import is_soft, plan, prepare, trim
from policies.settings import ClientEdits, ContextSettings
from policies.strategies.recall import Elsewhere, Pages
from policies.text.segments import Readings
from policies.tokens import CHARS4
from proxy.features.replay.script import Script
from tests.upstream.delivery import summarize

T = TypeVar("T")
SECONDS, COLD = 40.0, 2_000.0
ELSEWHERE = Elsewhere("0123456789ab", "user", "The staging queue listens on port 48213; only Mara may restart it.")
CLEAR = ClientEdits(results_at=3_000, results_over=8, keep=4, thinking=1, compact_at=9_000)


@dataclass
class Model:
    """Whoever is asked: a summariser that fails now and then, an operator's function, a judge of likeness."""

    log: list[str]
    fails: bool = False
    kept: dict[str, Summary] = field(default_factory=dict)
    asked: int = 0
    version: int = 0

    def drive(self, flow: Flow[T]) -> T:
        """What a flow returns; every question is noted."""
        reply: Reply | None = None
        while True:
            try:
                effect = next(flow) if reply is None else flow.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = self._reply(effect)

    def _reply(self, effect: Effect) -> Reply:
        match effect:
            case Offload():
                return Done()
            case Summarize():
                return self._answer(effect)
            case Together():
                return Answers(tuple(map(self._answer, effect.effects)))
            case Save():
                self.log.append(f"save {effect.reason} {digest(effect.checkpoint.encode())}")
                self.version += 1
                return StateSaved(self.version)
            case Compare():
                words = [frozenset(text.split()) for text in effect.texts]
                pairs = [(words[a], words[b]) for a, b in effect.pairs]
                scores = tuple(round(len(a & b) / max(1, len(a | b)), 6) for a, b in pairs)
                self.log.append(f"compare {effect.pairs} {effect.model} {scores}")
                return Alike(scores)
            case Trim():
                self.log.append(f"trim {effect}")
                gone = len(effect.indices) // 3
                stays = [i for n, i in enumerate(effect.indices) if n >= gone or effect.protected[n]]
                return Trimmed(tuple(Kept(i, "(shortened by the operator)" if i % 7 == 3 else None) for i in stays))
            case _:
                return Failed("unexpected")

    def _answer(self, asked: Summarize) -> Summary | Failed:
        self.asked += 1
        question = f"{asked.system}\0{asked.prompt}\0{sorted(asked.schema)}"
        self.log.append(f"ask {asked.purpose} {asked.key} {asked.max_tokens} {digest(question.encode())}")
        if self.fails or self.asked % 7 == 6:
            return Failed("timeout")
        if self.asked % 11 == 10:
            return Summary("")
        text = summarize(asked.prompt, limit=asked.max_tokens, count=CHARS4.count)
        return self.kept.setdefault(f"{asked.key}\0{asked.prompt}", Summary(text))


@dataclass
class Play:
    """One conversation under one policy, request by request; ``eventful`` has its client and operator interfere."""

    script: Script
    settings: ContextSettings
    window: int
    eventful: bool = True
    fails: bool = False
    resumed: str | None = None
    decisions: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.budget = divide(self.settings, window=self.window, requested=max(64, self.window // 16))
        self.known, self.trend, self.at = ConversationState(resumed=self.resumed), Trend(), 1_000.0
        self.model = Model(self.decisions, self.fails)
        self.readings, self.pages, self.sent = Readings(), Pages(), set[int]()
        self.tools = _tools_of(self.script.recording.tools)
        self.definitions = sum(tool.tokens for tool in self.tools.definitions)

    def go(self) -> "Play":
        """Every request of the conversation."""
        lengths = [request.length for request in self.script.requests]
        if self.eventful and len(lengths) > 24:  # a client that begins anew from an earlier point
            lengths = [*lengths[:20], lengths[9], lengths[10], *lengths[20:]]
        for number, length in enumerate(lengths):
            self._request(number, length)
            if self.eventful and number % 11 == 10:
                self._request(number, length)
        last = self._transcript(lengths[-1])
        state = state_of(last, known=self.known, counter=CHARS4, readings=self.readings)
        self.decisions.append(f"state {state.to_json()}")
        return self

    def _transcript(self, length: int) -> Transcript:
        made = self.script.transcript(length)
        made = replace(made, tools=self.definitions, read_tools=lambda: self.tools)
        known = max((n for n in self.sent if n <= len(made.chain)), default=0)
        self.known = replace(self.known, length=known)
        return made

    def _request(self, number: int, length: int) -> None:
        self.at += COLD if number % 17 == 16 else SECONDS
        transcript = self._transcript(length)
        self._interfere(number, transcript)
        decision = self._planned(transcript, number)
        self.decisions.append(f"request {number} {length}")
        if decision is not None and self.eventful and number % 23 == 22:
            self._remember(decision, transcript)
            decision = self._refused_upstream(transcript, number, decision) or decision
        if decision is not None:
            self._remember(decision, transcript)
            self._after(transcript, decision)
        if number % 19 == 18:
            self.decisions.append(self._trimmed(transcript))
        self.sent.add(len(transcript.chain))

    def _interfere(self, number: int, transcript: Transcript) -> None:
        """What an operator does beside the conversation."""
        if not self.eventful:
            return
        if number == 12 and len(transcript.messages) > 8:
            message = transcript.messages[8]
            pin = Edit(message.digest[:6], 0, EditKind.PIN, "", message.ref, 0)
            self.known = replace(self.known, edits={**self.known.edits, pin.key: pin})
        self.known = replace(self.known, wanted="compact" if number == 29 else None)

    def _planned(self, transcript: Transcript, number: int, *, ceiling: int | None = None) -> Decision | None:
        self.model.version = self.known.version
        flow = plan(
            transcript,
            settings=self.settings,
            budget=self.budget,
            known=self.known,
            counter=CHARS4,
            trend=self.trend,
            at=self.at,
            ceiling=ceiling,
            summarizer_input=None if number % 2 else 6_000,
            readings=self.readings,
            pages=self.pages,
            elsewhere=(ELSEWHERE,) if self.eventful else (),
            edits=CLEAR if self.eventful and number % 13 == 7 else None,
        )
        try:
            decision = self.model.drive(flow)
        except BudgetUnreachable as error:
            self.decisions.append(f"refused {error} {error.buckets} {error.protected}")
            self.paths.add(type(error).__name__)
            return None
        except PolicyError as error:
            self.decisions.append(f"failed {error}")
            self.paths.add(type(error).__name__)
            return None
        self._note(decision)
        pieces = decision.pieces if decision.pieces is not None else self.script.raw_pieces(len(transcript.messages))
        self.bodies.append(b"[%s]%s" % (b",".join(self.script.rendered(pieces)), repr(decision.pruned).encode()))
        return decision

    def _refused_upstream(self, transcript: Transcript, number: int, before: Decision) -> Decision | None:
        """A smaller plan, as it is made after an upstream refused one."""
        smaller = self._planned(transcript, number, ceiling=int(before.raw_after * 0.8))
        return smaller or self._planned(transcript, number, ceiling=before.raw_after - 1)

    def _note(self, decision: Decision) -> None:
        self.decisions += lines_of(decision)
        self.paths |= {str(decision.action), *(edit.kind.value for edit in decision.edits), *decision.applied}
        self.paths |= {f"{r.layer}{' rung' if r.rung else ''}" for r in decision.trail if r.kept}
        self.paths |= {f"{r.layer}: {r.reason}" for r in decision.trail if r.reason}
        self.paths |= {event.kind for event in decision.events} | {decision.pressure.zone, decision.pressure.status}
        if decision.cut is not None:
            self.paths.add(f"cut {decision.cut.origin}")

    def _remember(self, decision: Decision, transcript: Transcript) -> None:
        """Keep what the store keeps."""
        known, length = self.known, len(transcript.chain)
        self.trend = decision.trend
        self.known = replace(
            known,
            edits={**known.edits, **{edit.key: edit for edit in decision.edits}},
            cuts=known.cuts if decision.cut is None else (*known.cuts, decision.cut),
            prepared=known.prepared if decision.cut is None else None,
            checkpoint=decision.checkpoint or known.checkpoint,
            checkpoint_length=length if decision.checkpoint else known.checkpoint_length,
            version=max(known.version, self.model.version) + decision.is_new,
        )

    def _after(self, transcript: Transcript, decision: Decision) -> None:
        """What is done once an answer is out: notes, milestones, the next summary."""
        rules = {"settings": self.settings, "known": self.known}
        found = notes_of(transcript, known=self.known)
        self.known = replace(self.known, notes=(*self.known.notes, *found))
        length, compacts = len(transcript.chain), limits_for(self.settings, self.budget).compacts
        near = compacts is not None and decision.raw_after > 0.6 * compacts
        soft = is_soft(
            decision.raw_after, length, budget=self.budget, buckets=decision.buckets, trend=decision.trend, **rules
        )
        self.decisions.append(
            f"after {milestone_of(transcript, known=self.known)} {near} {soft} {[n.text for n in found]}"
        )
        if wants_notes(transcript, **rules):
            written = self.model.drive(write_notes(transcript, known=self.known, counter=CHARS4, max_input=5_000))
            self.decisions.append(f"notes {[(n.category, n.text) for n in written]}")
        if decision.is_new or not soft:
            return
        ready = self.model.drive(
            prepare(transcript, budget=self.budget, counter=CHARS4, readings=self.readings, **rules)
        )
        if ready is not None:
            self.decisions.append(f"prepared {ready.covers} {ready.text!r} {ready.purpose} {ready.calls}")
            self.known = replace(self.known, prepared=ready if ready.text else None)

    def _trimmed(self, transcript: Transcript) -> str:
        try:
            decision = trim(transcript, settings=self.settings, budget=self.budget, counter=CHARS4)
        except PolicyError as error:
            return f"not trimmed {error}"
        return "\n".join(("trimmed", *lines_of(decision)))

    @property
    def ledger(self) -> list[str]:
        """All that is known at the end."""
        edits = [edit_line(edit) for edit in self.known.edits.values()]
        cuts = [cut_line(cut) for cut in self.known.cuts]
        return [*edits, *cuts, f"checkpoint {self.known.checkpoint}", f"trend {self.trend.to_json()}"]

    @property
    def digests(self) -> list[str]:
        """Of the bodies, of the decisions, of the ledger."""
        decisions, ledger = (
            "\n".join(self.decisions).encode(errors="replace"),
            "\n".join(self.ledger).encode(errors="replace"),
        )
        return [digest(b"\n".join(self.bodies)), digest(decisions), digest(ledger)]


def digest(data: bytes) -> str:
    """Twelve hex digits."""
    return blake2b(data, digest_size=6).hexdigest()


def edit_line(edit: Edit) -> str:
    """One edit in words."""
    key = f"{edit.digest.hex()}.{edit.occurrence}"
    return f"edit {key} {edit.kind.value} {edit.ref} {edit.tokens} {edit.chain.hex()} {edit.length} {edit.text!r}"


def cut_line(cut: Any) -> str:
    """One cut in words."""
    figures = (
        f"{cut.covers} {cut.prefix.hex()} {cut.tokens} v{cut.version} {cut.ref} {cut.before} {cut.after} {cut.origin}"
    )
    return f"cut {figures} {cut.noted} {cut.length} {cut.layer} {cut.narrative!r} {cut.text!r}"


def lines_of(decision: Decision) -> list[str]:
    """A decision in words, everything that others read of it."""
    tokens = f"{decision.before} {decision.after} {decision.limit} {decision.raw_after}"
    lines = [f"{decision.action} {tokens} {decision.pressure} {decision.pressure.level:.6f} {decision.buckets}"]
    lines.append(f"applied {decision.applied} removed {decision.removed} covered {decision.covered}")
    lines.append(f"pruned {decision.pruned} window {decision.window_id} new {decision.is_new}")
    if decision.reading is not None:
        names = (
            "current_tokens",
            "max_tokens",
            "utilization_pct",
            "zone",
            "velocity_tokens_per_turn",
            "turns_until_red",
        )
        names += ("source", "last_delta", "velocity_class", "spike", "rot_guard")
        lines.append(f"reading {[getattr(decision.reading, name) for name in names]}")
    lines.append(f"trend {decision.trend.to_json()}")
    lines += [f"event {event.kind} {dict(event.facts)}" for event in decision.events]
    for report in decision.trail:
        figures = f"{report.before} {report.after} {report.units} {report.kept} {report.ref} {report.scope}"
        seen = f"{report.reason!r} {report.rung} {report.scanned} {report.prunable}"
        lines.append(f"layer {report.layer} {figures} {seen}")
        lines += [
            f"condensed {c.strategy} {c.original_tokens} {c.compressed_tokens} {c.calls} {c.purpose} {c.ref} {c.key} {c.failure}"
            for c in report.condensed
        ]
    lines += [edit_line(edit) for edit in decision.edits]
    lines += [cut_line(decision.cut)] if decision.cut is not None else []
    lines.append(f"checkpoint {decision.checkpoint}")
    pieces = decision.pieces or ()
    return [*lines, f"pieces {[(p.index, p.tokens, p.kind and p.kind.value, p.is_summary) for p in pieces]}"]


def _tools_of(tools: object) -> Tools:
    given: Sequence[Mapping[str, Any]] = tools if isinstance(tools, list) else ()
    found = [each.get("function", {}) for each in given]
    return Tools(tuple(ToolDefinition(f["name"], len(str(f)) // 4, str(f.get("description", ""))) for f in found))
