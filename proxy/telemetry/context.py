"""W3C Trace Context and Baggage as they stand in a request's headers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import urandom
from typing import Final
from urllib.parse import unquote

from proxy.telemetry import names
from proxy.telemetry.names import clean, session_id

Header = tuple[bytes, bytes]

CONTEXT_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
MAX_STATE: Final = 2_048
MAX_BAGGAGE: Final = 8_192
_HEX: Final = frozenset(b"0123456789abcdef")
_READ: Final = frozenset({names.SESSION_ID, names.USER_ID})


@dataclass(frozen=True, slots=True)
class Parent:
    """The W3C context that a trace continues; ``span`` is 0 and ``state`` empty for a trace that starts here."""

    trace: int
    span: int = 0
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Context:
    """What a request's headers say of its trace; ``sampled`` is None without a parent."""

    parent: Parent
    sampled: bool | None = None
    user_agent: bytes = b""
    baggage: Mapping[str, str] = field(default_factory=dict)


def context_in(headers: Sequence[Header], *, baggage: bool = False) -> Context:
    """The context to continue, or a new one; of the baggage only who is speaking, and only if it is to be read."""
    given = state = user_agent = carried = b""
    for name, value in headers:
        if name == b"traceparent":
            given = value if not given else b"twice"
        elif name == b"tracestate":
            state = state + b"," + value if state else value
        elif name == b"user-agent":
            user_agent = value
        elif name == b"baggage" and baggage:
            carried = carried + b"," + value if carried else value
    who = _baggage(carried) if carried else {}
    fields = given.strip().split(b"-")
    if _well_formed(fields):
        trace, span = int(fields[1], 16), int(fields[2], 16)
        if trace and span:
            kept = state if len(state) <= MAX_STATE else b""
            return Context(Parent(trace, span, kept), bool(int(fields[3], 16) & 1), user_agent, who)
    return Context(Parent(int.from_bytes(urandom(16), "big") or 1), None, user_agent, who)


def _well_formed(fields: Sequence[bytes]) -> bool:
    """W3C Trace Context: version 00 has exactly four fields, later ones may have more, ff is invalid."""
    if len(fields) < 4 or tuple(map(len, fields[:4])) != (2, 32, 16, 2) or fields[0] == b"ff":
        return False
    return (fields[0] != b"00" or len(fields) == 4) and all(_HEX.issuperset(part) for part in fields[:4])


def _baggage(value: bytes) -> dict[str, str]:
    """``session.id`` and ``user.id`` of a baggage header; more than 8,192 bytes are none."""
    if len(value) > MAX_BAGGAGE:
        return {}
    found: dict[str, str] = {}
    for member in value.decode("latin-1").split(","):
        key, given, text = member.partition(";")[0].partition("=")
        name, said = key.strip(), unquote(text.strip())
        if given and said and name in _READ:
            found[name] = session_id(said) if name == names.SESSION_ID else clean(said)
    return found
