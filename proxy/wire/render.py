"""A planned array as bytes, the hidden rounds in it, and the request by which its model writes notes in place.

Hidden rounds are calls that Weir has answered itself. Reasoning is bound to what the model has read before it, so they
go up again with every later request. The client knows nothing of them: it sends its answer back as one message, or one
run, which is cut where it was.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from policies.effects import Summarize
from policies.ledger import PlannedMessage
from policies.messages import HEAD_ROLES
from proxy.wire.chat import MARK, marker_for_summary
from proxy.wire.codec import CHAT, ClientRequest, Codec, LimitField, rewritten
from proxy.wire.raw import Raw, read_value, split_object, write_value


def render(
    pieces: Sequence[PlannedMessage],
    messages: Sequence[Raw],
    marked: frozenset[int],
    *,
    role: str = "user",
    codec: Codec = CHAT,
) -> list[Raw]:
    """The raw segments of a planned array: the client's own bytes wherever a message was not replaced.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers stay on what
    replaces their block. A summary is a message of ``role`` user or system; with ``system_append`` it is added to the
    first system message, and is a user's where there is none.
    """
    rendered = [
        b"" if piece.index is None else _render(piece, messages[piece.index], marked=piece.index in marked, codec=codec)
        for piece in pieces
    ]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        rendered[n] = codec.own(pieces[n].text or "", markers, role=role if pieces[n].is_summary else "user")
    if own and role == "system_append":
        return _appended(pieces, rendered, codec)
    return rendered


def _appended(pieces: Sequence[PlannedMessage], rendered: list[Raw], codec: Codec) -> list[Raw]:
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if codec.view(rendered[0]).get("role") not in HEAD_ROLES or place is None:
        return rendered
    first = codec.extended(rendered[0], pieces[place].text or "")
    return [first, *(raw for n, raw in enumerate(rendered[1:], 1) if n != place)]


def _render(piece: PlannedMessage, raw: Raw, *, marked: bool, codec: Codec) -> Raw:
    if piece.text is not None:
        raw = codec.edited(raw, piece.kind, piece.text)
    elif marked:
        raw = codec.unmarked(raw)
    return raw if piece.rounds is None else codec.with_rounds(raw, piece.rounds.text)


_MARKED = f'"{MARK}"'.encode()
_FREE = frozenset({"auto", "none"})


def standing_body(
    effect: Summarize,
    *,
    request: ClientRequest,
    role: str = "user",
    pruned: Collection[str] = (),
    limit: LimitField = "max_tokens",
) -> bytes:
    """The client's request over ``effect.standing``, with the instruction as its last message.

    All of its fields go along but those that are about its own answer, so that the prefix is the one the provider
    has seen. No schema is asked for: OpenAI's cache reads a schema before the messages. ``role`` is where the policy
    has summaries stand, ``pruned`` are the tools that the forwarded requests go without.
    """
    raws = request.messages or ()
    kept = [piece.index for piece in effect.standing if piece.index is not None and piece.text is None]
    marked = frozenset(index for index in kept if _is_marked(raws[index], request.codec))
    codec = request.codec
    asked = codec.own(effect.prompt, {}, role="user")
    standing = render(effect.standing, raws, marked, role=role, codec=codec)
    fields = dict(split_object(rewritten(request, messages=[*standing, asked], pruned=pruned)))
    limited = codec.limit_in_place(request, effect.max_tokens, limit)
    own = {name: write_value(value) for name, value in limited.items()}
    sent = {name: bytes(raw) for name, raw in fields.items() if name not in codec.own_answer} | own
    sent["stream"] = b"false"
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in sent.items()) + b"}"


def forces_a_call(request: ClientRequest) -> bool:
    return any(_forced(request.value(name)) for name in ("tool_choice", "function_call"))


def _forced(choice: Any) -> bool:
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            choice = allowed.get("mode") if isinstance(allowed, dict) else choice.get("mode")
        else:
            choice = choice.get("type", "function")
    return choice is not None and choice not in _FREE


def _is_marked(raw: Raw, codec: Codec) -> bool:
    return _MARKED in bytes(raw) and MARK in codec.view(raw)


@dataclass(frozen=True, slots=True)
class HiddenRound:
    """What of one round the client has not seen: ``calls`` as the model made them, ``outputs`` as they went back.

    The client has seen ``after`` elements of the answer before it, ``said`` of them no reasoning.
    """

    after: int
    said: int
    calls: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]


def write_rounds(rounds: Sequence[HiddenRound], shown: int, skipped: int = 0) -> str:
    """The rounds of an answer of which the client has seen ``shown`` elements, as JSON text.

    The first ``skipped`` of them are of an answer that was given up: what follows was not made behind them.
    """
    kept = {"of": shown, "skipped": skipped, "rounds": [asdict(each) for each in rounds]}
    return write_value(kept).decode("utf-8", "surrogatepass")


def cuts_of(elements: Sequence[Raw], text: str, thoughts: Collection[str]) -> tuple[int, list[tuple[int, HiddenRound]]]:
    """What is to be skipped of the answer as its client sends it back, and the rounds with the place of each in it.

    A client may leave reasoning out: then the other elements tell. Nothing where nobody can tell.
    """
    kept = read_value(text.encode("utf-8", "surrogatepass"))
    if not isinstance(kept, dict):
        return 0, []
    rounds = [HiddenRound(**each) for each in kept["rounds"]]
    if len(elements) == kept["of"]:
        return kept["skipped"], [(each.after, each) for each in rounds]
    values = [read_value(element) for element in elements]
    if any(isinstance(value, dict) and value.get("type") in thoughts for value in values):
        return 0, []
    return 0, [(min(each.said, len(elements)), each) for each in rounds]
