"""``POST /v1/chat/completions``: the managed route."""

from collections.abc import MutableMapping
from typing import Any

from proxy.exchange import Exchange
from proxy.intake import Receive
from proxy.relay import Send
from proxy.runtime import Runtime


class ChatCompletions:
    """The ASGI application of the route."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        await Exchange(self._runtime, scope, receive, send).run()
