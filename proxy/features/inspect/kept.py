"""What is kept of a request for who looks at it: its two arrays, by reference."""

from policies.ledger import Decision
from policies.settings import Inspect
from proxy.planning.values import Recognized
from proxy.store.records import Inspection
from proxy.wire import view_of_stored
from proxy.wire.chat import body_of
from proxy.wire.codec import ClientRequest


def inspection_of(
    recognized: Recognized, decision: Decision | None, request: ClientRequest | None, keep: Inspect
) -> Inspection:
    """The two arrays of a request; what was never given to the store before goes with them.

    ``decision`` is the one that was carried out, None where the request was sent as it came.
    """
    thread = recognized.thread
    transcript = recognized.transcript
    count = len(transcript.messages)
    raws = recognized.new
    known = thread.inspected
    if known < count - len(raws) and request is not None and request.messages is not None:
        raws = request.messages
    thread.inspected = count
    return Inspection(
        keep=keep.requests,
        messages=transcript.messages,
        pieces=None if decision is None else decision.pieces,
        raws=raws,
        first=count - len(raws) if raws is recognized.new else 0,
        pruned=() if decision is None else decision.pruned,
        tools=transcript.tools,
    )


def text_of(raw: bytes) -> str:
    """What a message says whose JSON is kept: its text, its calls, and what is attached."""
    body = body_of(view_of_stored(raw))
    parts = [body.whole] if body.whole else []
    parts += [f"→ {call.name}({call.arguments})" for call in body.calls]
    parts += [f"[{each}]" for each in body.attached]
    if body.reasoning:
        parts.insert(0, f"[thinking] {body.reasoning}")
    return "\n".join(parts).encode("utf-8", "replace").decode()
