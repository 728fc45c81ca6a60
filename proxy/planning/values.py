"""What a request is to be planned with, what was recognised in it, the plan, and what it changes in
the store.

The rows of a batch, for the audit, add up: what they set free is what the request was before the
batch less what it is after it, placeholders, markers and summaries included.
"""

import datetime as dt
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Protocol

import msgspec

from policies.effects import Effect, Reply
from policies.ledger import ADDING, ConversationState, Cut, Decision, EditKind, Trend
from policies.limits import BucketExceeded, BudgetUnreachable, Limits
from policies.loads import Load
from policies.memory.checkpoint import Checkpoint
from policies.messages import ToolCall, ToolDefinition, Transcript, answered_calls
from policies.settings import ClientEdits, ContextSettings
from policies.summary.prompts import PROMPTS
from policies.tokens import middle_of
from proxy.conversation.thread import Thread, View
from proxy.effects.perform import Ask, Patience, Spent
from proxy.errors import ContextLengthExceeded
from proxy.models.limits import ModelLimits
from proxy.store.records import Change, EvictionRow, Original
from proxy.telemetry.trace import NULL_SPAN, ExchangeTrace, Span
from proxy.wire.codec import ClientRequest, tool_definitions, tool_description
from proxy.wire.counting import MAX_ERROR, TextCounter
from proxy.wire.raw import Raw, read_value
from proxy.wire.transcripts import skimmed

ResolveLimits = Callable[[], Awaitable[ModelLimits]]

CLAIMED = 60.0
"""Seconds after which a process that began to have a summary written, and never ended, is waited
for no longer.
"""


class Paid(Protocol):
    """Answers effects, and reports what the answers cost."""

    trace: ExchangeTrace
    spent: Spent

    async def __call__(self, effect: Effect) -> Reply: ...


class PlanRequest(msgspec.Struct, kw_only=True):
    """One request that is to be planned: what is requested, by whom, and what it may cost.

    ``resume`` is the conversation that the client wants to go on from, ``resumes`` the one that it
    may; ``ask`` answers while the request waits, ``ask_later`` makes the object that does so
    afterwards; ``patience`` is how long it may wait for models; ``edits`` is what the client wants
    removed; ``since`` is when one that waited for room could have begun (``time.monotonic``).
    ``binds`` says that the model signs what it thinks for what precedes it, ``unbinds`` that no
    such thinking is valid any more; ``follows`` that its provider holds what came before.
    """

    request: ClientRequest
    tenant: str
    name: str | None
    settings: ContextSettings
    counter: TextCounter
    limits: ResolveLimits
    ask: Ask
    patience: Patience
    ask_later: Callable[..., Ask] | None = None
    summarizer_input: int | None = None
    resume: str | None = None
    resumes: str | None = None
    parent: str | None = None
    edits: ClientEdits | None = None
    binds: bool = False
    unbinds: bool = False
    follows: bool = False
    id: str = ""
    since: float | None = None
    span: Span = NULL_SPAN

    @property
    def drops_unbound(self) -> bool:
        """Whether the provider itself has to leave out thinking that is not valid any more.

        Where thinking is ``enabled`` an open loop of tools has to begin with it, so that it cannot
        be taken out here.
        """
        thinking = self.request.value("thinking") if self.binds or self.unbinds else None
        return isinstance(thinking, dict) and thinking.get("type") == "enabled"

    def is_refused_state(self, thread: Thread, transcript: Transcript) -> bool:
        if self.resumes is None or thread.known.resumed is not None:
            return False
        return all(m.role != "assistant" for m in transcript.messages)

    def needs_exactly(
        self, view: View, known: ConversationState, tokens: int, limits: Limits
    ) -> bool:
        is_asked = known.wanted is not None or known.resumed is not None or self.edits is not None
        is_told = is_asked or not view.ledger.is_empty
        counts_parts = (
            self.settings.preempt
            or self.settings.ingest.from_start
            or limits.scoped
            or limits.refused
        )
        return bool(is_told or counts_parts) or tokens * (1 + MAX_ERROR) > limits.trigger


class Recognized(msgspec.Struct, frozen=True, kw_only=True):
    """A request's messages, the conversation that they belong to, and what fits.

    ``limits`` are the model's, ``policy_limits`` what the policy makes of them; ``view`` is what
    was decided for their window. An earlier request has sent ``length`` messages after the head;
    ``marked`` ones carry Weir's own mark; ``trend`` is the growth before this request; ``new`` are
    the raw messages at its end that were not seen before; ``sampled``: its tokens are right within
    ``MAX_ERROR``; ``loads`` are what exceeds the upstream's limits other than tokens.
    """

    transcript: Transcript
    thread: Thread
    view: View
    length: int
    limits: ModelLimits
    policy_limits: Limits
    trend: Trend
    marked: frozenset[int] = frozenset()
    has_media: bool = False
    degraded: tuple[str, ...] = ()
    new: Sequence[Raw] = ()
    sampled: bool = False
    loads: tuple[Load, ...] = ()

    def known(self, *, observed: bool = False) -> ConversationState:
        """What was decided for its window, and what else is known; of an observed conversation what
        would be.
        """
        return self.thread.known_at(self.view, self.length, observed=observed)


def readable(recognized: Recognized) -> Transcript:
    return skimmed(recognized.transcript, window=recognized.limits.budget.window)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes up, and how it came about.

    ``recognized`` is None for a request that is not managed, or could not be read; ``sent`` the
    uncalibrated tokens of what goes up, 0 where they were not counted; ``evictions`` what was newly
    taken out, or would have been; ``refused`` why an observed request would have been refused;
    ``betas`` features of Anthropic's that the body needs beyond the client's; ``drops_unbound``
    that the provider leaves out thinking; ``restarted`` that it begins anew what the provider
    holds; ``native`` that the provider is to compact.
    """

    body: bytes
    recognized: Recognized | None = None
    decision: Decision | None = None
    sent: int = 0
    prepared: bool = False
    evictions: tuple[EvictionRow, ...] = ()
    refused: str | None = None
    degraded: Sequence[str] = ()
    betas: tuple[bytes, ...] = ()
    drops_unbound: bool = False
    restarted: bool = False
    native: bool = False


NO_PLAN = Plan(body=b"")


IN_WORDS: Mapping[str, str] = {
    "system": "the system prompt",
    "tools": "the tool definitions",
    "memory": "memory",
    "summary": "the summary",
    "history": "the conversation",
    "tool_outputs": "tool results",
}
"""What a developer who does not know buckets would call them."""


def too_long(error: BudgetUnreachable) -> ContextLengthExceeded:
    """The refusal, in the words that clients match on."""
    begins = f"This model's maximum context length is {error.window} tokens"
    facts = dict(vars(error))
    if isinstance(error, BucketExceeded):
        what = IN_WORDS.get(error.bucket, error.bucket)
        return ContextLengthExceeded(
            f"{begins}, of which the context policy of this proxy (Weir) allows {error.cap} for"
            f" {what}. However, your request holds {error.used} tokens there. Please shorten"
            f" {what}, or ask the operator for another cap on the bucket {error.bucket}.",
            param="tools" if error.bucket == "tools" else "messages",
            weir=facts,
        )
    listed = ", ".join(f"{name} {tokens}" for name, tokens in error.buckets.items() if tokens)
    return ContextLengthExceeded(
        f"{begins}. However, what cannot be removed from your messages takes"
        f" {sum(error.buckets.values())} tokens ({listed}) and {error.reserve} are reserved for the"
        " answer. Please reduce the length of the messages.",
        param="messages",
        weir=facts,
    )


def empty_change(recognized: Recognized, now: float) -> Change:
    transcript = recognized.transcript
    thread = recognized.thread
    ends = thread.ends(transcript)
    return msgspec.structs.replace(
        thread.branch.change(now),
        window=recognized.view.window,
        chain_end=ends[0] if ends else b"",
        length=len(transcript.chain),
    )


def change_of(
    plan_request: PlanRequest,
    recognized: Recognized,
    decision: Decision,
    evictions: tuple[EvictionRow, ...],
    now: float,
) -> Change:
    nothing = empty_change(recognized, now)
    cut = decision.cut
    thread = recognized.thread
    messages = recognized.transcript.messages
    state = decision.checkpoint if plan_request.settings.checkpoints.save_at is not None else None
    base = max(1, recognized.limits.budget.base(plan_request.settings))
    return msgspec.structs.replace(
        nothing,
        edits=decision.edits,
        cut=cut,
        originals=(
            *(_original(plan_request, recognized, i) for i in decision.removed),
            *_middles(plan_request, recognized, decision),
            *_definitions(plan_request, decision),
        ),
        covered=tuple(messages[i].ref for i in decision.covered),
        checkpoint=None if state is None else stamped(state, now, version=nothing.expected + 1),
        reason=cut.origin if cut is not None and decision.window_id is not None else "compaction",
        window_id=(
            1
            if decision.checkpoint is None
            else Checkpoint.from_json(decision.checkpoint).window_id
        ),
        resumed=thread.known.resumed if cut is not None and cut.origin == "resume" else None,
        evictions=evictions,
        request=plan_request.id,
        figures=figures_of(decision, plan_request.settings, base=base),
        condensed=condensed_in(decision),
    )


def stamped(checkpoint: str, at: float, *, version: int) -> str:
    moment = dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    return replace(Checkpoint.from_json(checkpoint), version=version, saved_at=moment).to_json()


def _definitions(plan_request: PlanRequest, decision: Decision) -> Iterator[Original]:
    new = {edit.ref for edit in decision.edits if edit.kind is EditKind.PRUNE_TOOLS}
    if not new:
        return
    for name, raws in tool_definitions(plan_request.request).items():
        ref = ToolDefinition(name, 0).digest.hex()[:12]
        if ref in new:
            body = bytes(raws[0]) if len(raws) == 1 else b"[" + b",".join(raws) + b"]"
            said = " ".join((name, *(tool_description(read_value(raw)) for raw in raws)))
            yield Original(
                ref=ref,
                role="tool_definition",
                tokens=plan_request.counter.count(said),
                body=body,
                text=said,
            )


def _original(plan_request: PlanRequest, recognized: Recognized, index: int) -> Original:
    message = recognized.transcript.messages[index]
    raw = (plan_request.request.messages or ())[index]
    return Original(
        ref=message.ref,
        role=message.role,
        tokens=message.tokens,
        body=plan_request.request.codec.stored(raw),
        text=recognized.transcript.read(index).everything,
    )


def _middles(
    plan_request: PlanRequest, recognized: Recognized, decision: Decision
) -> Iterator[Original]:
    """What was left out of messages that may be sent again with more appended, under a name that
    does not change.
    """
    for piece in decision.pieces or ():
        if (
            piece.index not in decision.removed
            or piece.text is None
            or piece.kind is not EditKind.CLIP
        ):
            continue
        found = middle_of(recognized.transcript.read(piece.index).text, piece.text)
        if found is not None:
            ref, text = found
            role = recognized.transcript.messages[piece.index].role
            body = json.dumps({"role": role, "content": text}).encode()
            yield Original(
                ref=ref, role=role, tokens=plan_request.counter.count(text), body=body, text=text
            )


GONE = frozenset({EditKind.EVICT, EditKind.PRUNE})
CUT = "cut"


def evictions_of(
    transcript: Transcript,
    decision: Decision,
    known: ConversationState,
    *,
    settings: ContextSettings,
) -> tuple[EvictionRow, ...]:
    if not decision.is_new:
        return ()
    batch = _Batch(transcript, decision, known, settings)
    return (*batch.edits(), *batch.covered())


class _Batch:
    def __init__(
        self,
        transcript: Transcript,
        decision: Decision,
        known: ConversationState,
        settings: ContextSettings,
    ) -> None:
        self._transcript = transcript
        self._decision = decision
        self._known = known
        self._settings = settings
        self._old = _newest_cut(transcript, known.cuts)
        self._hidden = (
            frozenset() if self._old is None else frozenset(self._old.hidden(transcript.lasting))
        )
        affected = {*decision.removed}
        steps = [u for u in transcript.steps if affected.intersection(u.indices)]
        self._calls = answered_calls(transcript, steps)
        self._kept = tuple(report.layer for report in decision.trail if report.kept)

    def edits(self) -> Iterator[EvictionRow]:
        places = {self._key(i): i for i in self._decision.removed}
        for edit in self._decision.edits:
            if edit.kind in ADDING:
                continue
            layer = self._layer(str(edit.kind))
            if edit.kind is EditKind.PRUNE_TOOLS:
                defined = {d.digest: d for d in self._transcript.read_tools().definitions}.get(
                    edit.digest
                )
                if defined is not None:
                    yield self._row(
                        edit.key,
                        edit.kind,
                        layer,
                        before=defined.tokens,
                        after=0,
                        tool=defined.name,
                    )
            elif (index := places.get(edit.key)) is not None:
                before = self._tokens(index)
                call = self._calls.get(index)
                yield self._row(
                    edit.key, edit.kind, layer, before=before, after=edit.tokens, call=call
                )

    def covered(self) -> Iterator[EvictionRow]:
        cut = self._decision.cut
        if cut is None:
            return
        rest = self._old.tokens if self._old is not None and self._old.text else 0
        for index in self._decision.covered:
            if index in self._hidden:
                continue
            key = self._key(index)
            tokens = self._tokens(index)
            call = self._calls.get(index)
            known = self._known.edits.get(key)
            if call is None or (known is not None and known.kind in GONE):
                rest += tokens
            else:
                yield self._row(key, CUT, cut.layer, before=tokens, after=0, call=call)
        yield self._row(
            (cut.prefix, 0), CUT, cut.layer, before=rest, after=cut.tokens if cut.text else 0
        )

    def _row(
        self,
        key: tuple[bytes, int],
        kind: str,
        layer: str,
        *,
        before: int,
        after: int,
        call: ToolCall | None = None,
        tool: str = "",
    ) -> EvictionRow:
        return EvictionRow(
            digest=key[0],
            occurrence=key[1],
            kind=str(kind),
            layer=layer,
            policy=self._settings.name,
            scorer=self._scorer(layer),
            tool=tool if call is None else call.name,
            tokens_before=before,
            tokens_after=after,
            tokens_remaining=self._decision.raw_after,
        )

    def _key(self, index: int) -> tuple[bytes, int]:
        return self._transcript.messages[index].digest, self._transcript.occurrences[index]

    def _tokens(self, index: int) -> int:
        edit = self._known.edits.get(self._key(index))
        return self._transcript.messages[index].tokens if edit is None else edit.tokens

    def _layer(self, kind: str) -> str:
        return next((name for name in self._kept if name.startswith(kind)), kind)

    def _scorer(self, layer: str) -> str:
        own = (
            each.params.get("scorer") for each in self._settings.layers if each.strategy == layer
        )
        return next((str(name) for name in own if name is not None), "")


def _newest_cut(transcript: Transcript, cuts: Sequence[Cut]) -> Cut | None:
    return next(
        (cut for cut in reversed(cuts) if transcript.begins_with(cut.covers, cut.prefix)), None
    )


MAX_CONDENSED = 40
MAX_LAYERS = 32


def figures_of(decision: Decision, settings: ContextSettings, *, base: int) -> dict[str, object]:
    """The audit entry of a batch: the decision record (requirement A0.148).

    ``base`` is the denominator of the pressure, tokens.
    """
    return {
        "policy": settings.name,
        "action": decision.stage,
        "utilization_before": round(decision.before / base, 4),
        "utilization_after": round(decision.after / base, 4),
        "compression_strategy": decision.strategy,
        "new_window_id": decision.window_id,
    }


def condensed_in(decision: Decision) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for report in decision.trail:
        for each in report.condensed[: MAX_CONDENSED - len(found)]:
            digest = next((p.digest for p in PROMPTS.values() if p.purpose == each.purpose), None)
            row = {**asdict(each), "ratio": round(each.ratio, 2), "kept": report.kept}
            found.append(row if digest is None else row | {"prompt_digest": digest})
    return found


def layers_in(decision: Decision, estimate: Callable[[int], int]) -> list[dict[str, object]]:
    """What each layer did, in tokens as the upstream counts them: ``estimate`` makes them of
    Weir's.
    """
    return [
        {
            "layer": report.layer,
            "scope": report.scope,
            "tokens_before": estimate(report.before),
            "tokens_after": estimate(report.after),
            "units": report.units,
            "kept": report.kept,
            "rung": report.rung,
            "reason": report.reason or None,
            "ref": report.ref,
        }
        for report in decision.trail[:MAX_LAYERS]
    ]
