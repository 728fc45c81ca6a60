"""The floor: a relay that does nothing. Starlette in front, aiohttp behind, one worker, streaming
both ways.

    python -m benchmarks.floor --upstream http://127.0.0.1:9000

Prints ``{"port": N}`` once it listens. It is written to be cheap, so that what is compared with it
is not flattered.
"""

import argparse
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from multidict import CIMultiDict
from starlette.applications import Starlette
from starlette.routing import Route

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
NOT_RELAYED = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"}
)
READ_BUFFER = 1 << 17


class Relay:
    """The ASGI application: one route, every method, nothing looked at."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Keeps one pool of upstream connections."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        async with self._session:
            yield

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Relay one request, as its bytes arrive, and its answer likewise."""
        assert self._session is not None
        headers = CIMultiDict(
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
             if name not in NOT_RELAYED]
        )  # fmt: skip
        first = await receive()
        body: Any = _parts(first, receive) if first.get("more_body") else first.get("body") or None
        async with self._session.request(
            scope["method"],
            self._upstream + scope["path"],
            headers=headers,
            data=body,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        ) as answer:
            kept = [(n.lower(), v) for n, v in answer.raw_headers if n.lower() not in NOT_RELAYED]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _parts(first: MutableMapping[str, Any], receive: Receive) -> AsyncIterator[bytes]:
    message = first
    while True:
        if part := message.get("body"):
            yield part
        if not message.get("more_body"):
            return
        message = await receive()


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description="A relay that does nothing."
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="scheme, host and port")
    relay = Relay(parser.parse_args().upstream.rstrip("/"))
    app = Starlette(lifespan=relay.lifespan, routes=[Route("/{rest:path}", relay)])
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
    )
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
