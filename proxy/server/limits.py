"""What one client may take of the server, and how far the server is with stopping."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

App = Callable[..., Awaitable[None]]
DISCONNECT = "weir.disconnect"
"""The extension in a request's scope that has a function called when the client leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may take: times in seconds, sizes in bytes.

    ``header_timeout`` runs from the first byte of a head (or the connection) to its end, ``body_timeout`` from there to
    the last byte of the body, ``keep_alive`` between requests, ``stall`` while a reader takes nothing, ``linger``
    after a refusal. On shutdown readiness fails for ``notice`` before the listeners close, open answers have ``grace``
    to finish, and ``farewell`` to say why they are cut. ``concurrency``: requests at once, ``connections``: of
    clients at once; as many again are told that there is no room, more are reset. ``None`` for no limit.
    """

    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    stall: float = 60.0
    linger: float = 2.0
    header_bytes: int = 64 * 1024
    header_fields: int = 100
    body_bytes: int = 64 * 1024 * 1024
    concurrency: int | None = 1024
    connections: int | None = None
    notice: float = 0.0
    grace: float = 30.0
    farewell: float = 2.0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """How far the process is with stopping; in every request's ``scope["state"]["shutdown"]``.

    ``draining``: readiness is 503. ``cut``: what still streams must end now, with an error event; ``callbacks`` are
    called at that moment (a stream adds one while it runs, which costs less than waiting for the event).
    """

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    callbacks: set[Callable[[], None]] = field(default_factory=set)

    def cut_now(self) -> None:
        """Sets ``cut`` and calls every callback."""
        self.cut.set()
        for callback in tuple(self.callbacks):
            callback()
