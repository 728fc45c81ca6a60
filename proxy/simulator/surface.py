"""What an endpoint that answers in words must be able to do; the exchange is the same for all of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.simulator.answers import Spoken
from proxy.simulator.settings import Dialect, Request, SimulatorSettings
from proxy.simulator.window import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An answer with all that its rendering needs; ``created`` in seconds since 1970.

    ``cached`` of the ``prompt`` tokens were in the cache; ``written`` were put there by a cache marker.
    """

    id: str
    created: int
    model: str
    dialect: Dialect
    request: Request
    spoken: Spoken
    prompt: int
    cached: int
    written: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One endpoint: how it judges a request, counts it, and writes an answer."""

    check: Callable[[Request, SimulatorSettings], None]
    pieces: Callable[[Request], list[Piece]]
    body: Callable[[Outcome], Mapping[str, Any]]
    events: Callable[[Outcome], tuple[bytes, ...]]


def compact(value: Any) -> bytes:
    """JSON without spaces, non-ASCII as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def tool_pieces(request: Request) -> list[Piece]:
    """What is read before the messages: tool definitions and the schema of the answer."""
    pieces = [Piece("tools", request[name]) for name in ("tools", "functions") if request.get(name)]
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("json_schema"):
        pieces.append(Piece("tools", form["json_schema"]))
    return pieces
