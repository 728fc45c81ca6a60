"""The pages at ``/weir/ui``. What draws them is loaded with the first page that is requested."""

import asyncio
import importlib
from collections.abc import MutableMapping
from typing import Any

from proxy.errors import NotFound
from proxy.runtime import Runtime
from proxy.server import App
from proxy.stream import Receive, Send


class Dashboard:
    """The ASGI application of ``/weir/ui``, where the configuration wants it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._site: App | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if not self._runtime.config.dashboard:
            raise NotFound("The dashboard is turned off (dashboard: false).")
        if self._site is None:
            # Templates cost 30 ms to load, which a Weir that nobody looks at need not pay.
            module = await asyncio.to_thread(importlib.import_module, "proxy.dashboard.site")
            site: App = module.site(self._runtime)
            self._site = site
        await self._site(
            {**scope, "path": scope["path"].rstrip("/"), "root_path": ""}, receive, send
        )
