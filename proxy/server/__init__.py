"""The client's edge: an HTTP server with deadlines, caps and strict framing, that stops in the right order.

The server is uvicorn with Weir's protocol.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Literal

import uvicorn

from proxy.server.cycle import BODY_FOLLOWS, DISCONNECT, WRITE, App, ServerLimits, Shutdown
from proxy.server.protocol import ServerConfig

__all__ = ["BODY_FOLLOWS", "DISCONNECT", "WRITE", "App", "Server", "ServerLimits", "Shutdown", "run", "serve"]


_log = logging.getLogger("proxy.server")

ACCEPTS = 8
"""Connections that a turn of the loop may accept: libuv takes one a descriptor. ``dup()`` would make them block."""


class Server(uvicorn.Server):
    config: ServerConfig

    def __init__(self, config: ServerConfig, *, shutdown: Shutdown | None = None) -> None:
        super().__init__(config)
        self.stopping = shutdown or Shutdown()
        self.interrupted = False

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state["shutdown"] = self.stopping
        again = [socket.fromfd(s.fileno(), s.family, s.type) for s in sockets or () for _ in range(ACCEPTS)]
        await super().startup(again or None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's signature
        """Stops gracefully, or at once at the second signal; the process then ends with status 0.

        Who interrupts it is at its terminal, and no balancer has to be waited for.
        """
        self.force_exit = self.should_exit
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if not self.should_exit:  # the kernel ends what does not end by itself, whoever holds the interpreter
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.config.limits.patience)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self._drain(sockets or [])
        finally:
            for task in tuple(self.server_state.tasks):
                task.cancel()
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1.0)
        await self.lifespan.shutdown()

    async def _drain(self, sockets: list[socket.socket]) -> None:
        limits = self.config.limits
        self.stopping.draining.set()
        if not self.interrupted:
            await self._while(lambda: True, limits.drain)
        for server in self.servers:
            server.close()
        for sock in sockets:
            sock.close()
        for _ in range(2):  # turns of the loop: a request that has come already is read, and answered
            await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._while(self._busy, limits.grace):
            _log.warning("stopping: %d requests are still open and will be cut", len(self.server_state.tasks))
            self.stopping.cut_now()
            await self._while(self._busy, limits.farewell)

    def _busy(self) -> bool:
        return bool(self.server_state.tasks or self.server_state.connections)

    async def _while(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while condition():
            if self.force_exit or time.monotonic() >= end:
                return False
            await asyncio.sleep(0.02)
        return True


@asynccontextmanager
async def serve(
    app: App,
    *,
    limits: ServerLimits = ServerLimits(),
    lifespan: Literal["on", "off"] = "on",
    shutdown: Shutdown | None = None,
) -> AsyncIterator[Server]:
    config = ServerConfig(app, host="127.0.0.1", port=0, limits=limits, lifespan=lifespan)
    server = Server(config, shutdown=shutdown)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    ticking = asyncio.create_task(server.main_loop())
    try:
        yield server
    finally:
        ticking.cancel()
        await asyncio.wait([ticking])
        await server.shutdown()


def run(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 8400,
    limits: ServerLimits = ServerLimits(),
    sockets: list[socket.socket] | None = None,
    shutdown: Shutdown | None = None,
) -> int:
    """Serves until a signal; 0, or 1 if the application or a listener could not be started."""
    config = ServerConfig(app, host=host, port=port, limits=limits, lifespan="on")
    try:
        server = Server(config, shutdown=shutdown)
        server.run(sockets)
    except SystemExit:
        return 1
    return 0 if server.started else 1
