"""A change of a conversation's branch, as it is stored: what a decision took out, and the state that it saved."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace

from policies import Decision, EditKind
from policies.memory.checkpoint import Checkpoint
from policies.messages import ToolDefinition
from proxy.conversation.thread import Thread
from proxy.effects.evictions import evicted_calls, figures_of
from proxy.planning.values import PlanRequest, Recognized
from proxy.store.records import Change, EvictionRow, Original
from proxy.wire.codec import tool_definitions, tool_description
from proxy.wire.raw import read_value


def empty_change(recognized: Recognized, now: float) -> Change:
    transcript, branch = recognized.transcript, recognized.branch
    ends = recognized.thread.ends(transcript)
    return Change(
        tenant=branch.tenant,
        conversation=branch.conversation,
        name=branch.name,
        branch=branch.branch,
        expected=branch.version,
        at=now,
        chain_end=ends[0] if ends else b"",
        length=len(transcript.chain),
    )


def change_of(
    asked: PlanRequest, recognized: Recognized, decision: Decision, evictions: tuple[EvictionRow, ...], now: float
) -> Change:
    nothing, cut, thread = empty_change(recognized, now), decision.cut, recognized.thread
    rules, messages = asked.settings.checkpoints, recognized.transcript.messages
    state = decision.checkpoint if rules.enabled else None
    base = max(1, recognized.limits.budget.base(asked.settings))
    thread.evicted |= evicted_calls(evictions, thread.branch.branch)
    return replace(
        nothing,
        edits=decision.edits,
        cut=cut,
        originals=(
            *(_original(asked, recognized, i) for i in decision.removed),
            *_definitions(asked, decision),
        ),
        covered=tuple(messages[i].ref for i in decision.covered),
        checkpoint=None if state is None else stamped(state, now, version=nothing.expected + 1),
        reason=cut.origin if cut is not None and decision.window_id is not None else "compaction",
        window_id=1 if decision.checkpoint is None else Checkpoint.from_json(decision.checkpoint).window_id,
        keep=rules.keep,
        resumed=thread.known.resumed if cut is not None and cut.origin == "resume" else None,
        evictions=evictions,
        request=asked.id,
        figures=figures_of(decision, asked.settings, base=base),
    )


def stamped(checkpoint: str, at: float, *, version: int) -> str:
    moment = dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    return replace(Checkpoint.from_json(checkpoint), version=version, saved_at=moment).to_json()


def pruned_tools(asked: PlanRequest, thread: Thread) -> Iterator[str]:
    edits = thread.known.edits
    if asked.settings.summarizer == "same" and any(e.kind is EditKind.PRUNE_TOOLS for e in edits.values()):
        yield from (name for name in tool_definitions(asked.request) if (ToolDefinition(name, 0).digest, 0) in edits)


def _definitions(asked: PlanRequest, decision: Decision) -> Iterator[Original]:
    new = {edit.ref for edit in decision.edits if edit.kind is EditKind.PRUNE_TOOLS}
    if not new:
        return
    for name, raws in tool_definitions(asked.request).items():
        ref = ToolDefinition(name, 0).digest.hex()[:12]
        if ref in new:
            body = bytes(raws[0]) if len(raws) == 1 else b"[" + b",".join(raws) + b"]"
            said = " ".join((name, *(tool_description(read_value(raw)) for raw in raws)))
            yield Original(ref=ref, role="tool_definition", tokens=asked.counter.count(said), body=body, text=said)


def _original(asked: PlanRequest, recognized: Recognized, index: int) -> Original:
    message = recognized.transcript.messages[index]
    raw = (asked.request.messages or ())[index]
    body = recognized.transcript.read(index)
    said = [body.text, *(f"{call.name} {call.arguments}" for call in body.calls)]
    return Original(
        ref=message.ref,
        role=message.role,
        tokens=message.tokens,
        body=asked.request.codec.stored(raw),
        text="\n".join(part for part in said if part),
    )
