"""One lane played and measured: what it forwards is compared with what it forwarded before, priced and counted."""

import time
from dataclasses import dataclass

from policies.advise import Prices, request_cost
from proxy.rehearsal.facts import Retention, judge
from proxy.rehearsal.lanes import Forwarded, Lane
from proxy.rehearsal.script import Request, Script
from proxy.rehearsal.tally import Step, Tally, refusals
from proxy.wire.raw import Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One request in one lane: what was forwarded, how much of it the request before began with, and its price."""

    request: Request
    sent: Forwarded
    reused: int
    broke: bool
    cost: float
    seconds: float
    retention: Retention


class Meter:
    """Plays one lane of one conversation; ``room`` is what a prompt may have beside its answer, tokens."""

    def __init__(self, script: Script, lane: Lane, prices: Prices, *, room: int, keep_steps: bool) -> None:
        self.tally = Tally(conversations=1)
        self.steps: list[Step] = []
        self._script = script
        self._lane = lane
        self._prices = prices
        self._room = room
        self._keep = keep_steps
        self._sent: list[Raw] = []
        self._archived: set[int] = set()

    def play(self, request: Request) -> Played:
        """Forward one request."""
        started = time.perf_counter()
        sent = self._lane.forward(self._script, request.length)
        seconds = time.perf_counter() - started
        self._archived.update(sent.removed)
        reused, broke = self._compare(sent)
        return Played(
            request=request,
            sent=sent,
            reused=reused,
            broke=broke,
            cost=request_cost(self._prices, tokens=sent.tokens, cached=reused) if sent.pieces is not None else 0.0,
            seconds=seconds,
            retention=judge(
                self._script,
                request.facts,
                length=request.length,
                sent=sent.pieces or (),
                archived=self._archived,
            ),
        )

    def _compare(self, sent: Forwarded) -> tuple[int, bool]:
        """Tokens of the common prefix with what was forwarded before, and whether that goes on behind it."""
        if sent.pieces is None:
            return 0, False
        array = self._script.rendered(sent.pieces)
        same = 0
        for old, new in zip(self._sent, array, strict=False):
            if old is not new and bytes(old) != bytes(new):
                break
            same += 1
        broke = same < len(self._sent)
        tools = self._script.tools if self._sent else 0
        self._sent = array
        return tools + sum(piece.tokens for piece in sent.pieces[:same]), broke

    def settle(self, played: Played, *, unmanaged: float, sliding: float) -> None:
        """Count a request beside what it costs unmanaged and in a sliding window."""
        tally, sent = self.tally, played.sent
        if not played.request.counts:
            tally.retention += played.retention
            return
        went = sent.pieces is not None
        before = self._script.transcript(played.request.length).tokens
        one = Tally(
            requests=1,
            fit=int(went and sent.tokens <= self._room),
            refused=int(not went),
            failed=int(sent.action == "failed"),
            batches=int(played.broke),
            before=before,
            left_out=0 if went else before,
            tokens=sent.tokens if went else 0,
            reused=played.reused,
            largest=sent.tokens if went else 0,
            asked=sent.asked,
            cost=played.cost,
            unmanaged=unmanaged if went else 0.0,
            sliding=sliding if went else 0.0,
            seconds=played.seconds,
            slowest=played.seconds,
            why=refusals(sent.why),
            retention=played.retention,
        )
        tally.add(one)
        if tally.batches:
            tally.peak = max(tally.peak, tally.ratio)
        else:
            tally.early = max(tally.early, tally.ratio)
        if self._keep:
            self.steps.append(self._step(played, one))

    def _step(self, played: Played, one: Tally) -> Step:
        sent, script = played.sent, self._script
        priming = script.transcript(0).priming
        return Step(
            number=self.tally.requests,
            messages=played.request.length,
            before=one.before,
            after=one.tokens,
            limit=sent.limit,
            action=sent.action,
            zone=sent.zone,
            acted=sent.new,
            broke=played.broke,
            applied=sent.applied,
            layers=sent.layers,
            buckets=script.buckets(sent.pieces, priming=priming) if sent.pieces is not None else {},
            reused=one.reused,
            cost=one.cost,
            total=self.tally.cost,
            unmanaged=self.tally.unmanaged,
            fits=bool(one.fit),
            seconds=one.seconds,
            why=sent.why,
            retention=one.retention,
        )
