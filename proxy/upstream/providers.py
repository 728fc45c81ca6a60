"""Upstreams without OpenAI's protocol, spoken to through litellm.

litellm takes seconds and some 165 MB to import. It is imported only here, when a configuration names such an
upstream, at the start and not on the first request. It translates, and does nothing else that it could: it fetches no
table from the network, reads no ``.env``, calls nobody back, logs nothing, repeats and redirects nothing, and takes
no credential from the environment on a caller's behalf.

A client's body never reaches litellm as its own arguments: ``api_base``, ``fallbacks``, ``mock_response`` and the
like are refused, else a client could have the operator's key sent elsewhere (CVE-2024-6587).
"""

import asyncio
import contextlib
import importlib
import logging
import os
import ssl
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from proxy.config import UpstreamSettings
from proxy.errors import ProxyError, UpstreamEmpty, UpstreamTimeout
from proxy.upstream.litellm_answer import (
    StreamedAnswer,
    WholeAnswer,
    completion_body,
    first_of,
    provider_headers,
)
from proxy.upstream.litellm_failure import Library, Reader, Refusal, relayed
from proxy.upstream.litellm_request import copied_headers, decoded, translated
from proxy.upstream.upstreams import Answer, Headers, Provider

_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",
}
_SWITCHES: dict[str, object] = {
    "telemetry": False,
    "suppress_debug_info": True,
    "set_verbose": False,
    "turn_off_message_logging": True,
    "redact_messages_in_exceptions": True,
    "disable_streaming_logging": True,
    "drop_params": False,
    "modify_params": False,
    "num_retries": None,
    "disable_aiohttp_trust_env": True,
    "enable_anthropic_prompt_caching": False,
    "REPEATED_STREAMING_CHUNK_LIMIT": sys.maxsize,
}
_CALLBACKS = ("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback")
_LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")

_SDK = frozenset({"openai", "azure", "azure_text", "text-completion-openai", "custom_openai", "mistral", "openrouter"})
_NO_KEY = "no-key"
_POOLS = 256


def providers_for(upstreams: Iterable[UpstreamSettings]) -> dict[str, Provider]:
    """A provider for each upstream of kind ``litellm``, by the upstream's name; imports litellm if there is one.

    It changes the process's environment (``LITELLM_…``) so that the import asks no network.
    """
    wanted = [upstream for upstream in upstreams if upstream.kind == "litellm"]
    if not wanted:
        return {}
    library = _load()
    for provider in {str(upstream.provider) for upstream in wanted}:
        _rehearse(library, provider)
    return {upstream.name: LitellmProvider(upstream, library=library) for upstream in wanted}


def _load() -> Library:
    """litellm with everything switched off that is not translation."""
    os.environ.update(_ENVIRONMENT)
    litellm = importlib.import_module("litellm")  # costs seconds and 165 MB: only where an upstream needs it
    for name, value in _SWITCHES.items():
        setattr(litellm, name, value)
    for name in _CALLBACKS:
        setattr(litellm, name, [])
    for name in _LOGGERS:
        logging.getLogger(name).disabled = True
    others = (importlib.import_module(name) for name in ("httpx", "openai", "proxy.upstream.litellm_line"))
    return Library(litellm, *others)


def _rehearse(library: Library, provider: str) -> None:
    """Has litellm load now what it would load on the first request; with its own mock, nothing is sent."""
    message = {"role": "user", "content": "-"}
    with contextlib.suppress(Exception):  # the first request will say what is wrong with the provider
        library.litellm.completion(
            f"{provider}/-", messages=[message], api_key=_NO_KEY, mock_response="-", _skip_mcp_handler=True
        )
        importlib.import_module("litellm.litellm_core_utils.default_encoding")


class LitellmProvider:
    """One upstream of kind ``litellm``.

    An empty ``api_key`` in the configuration leaves the credential to the provider's own way of finding one, for
    example the instance's AWS role. A caller without a credential of its own never gets that far.
    """

    def __init__(self, upstream: UpstreamSettings, *, library: Library) -> None:
        self._upstream = upstream
        self._name = str(upstream.provider)
        self._library = library
        self._timeout = upstream.timeout
        self._reader = Reader(library, upstream.name, upstream.timeout.connect)
        self._http = importlib.import_module("litellm.llms.custom_httpx.http_handler")
        self._owned: Callable[[str], bool] = importlib.import_module("litellm.types.utils").is_litellm_owned_kwarg
        self._compatible = self._name in _SDK or self._name in library.litellm.openai_compatible_providers
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()
        self._closing: set[asyncio.Future[None]] = set()

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        """The answer to a chat request, its first chunk read if it is a stream, so that its status is the true one.

        Raises UpstreamUnreachable, UpstreamTimeout, UpstreamEmpty, InvalidRequest.
        """
        request = decoded(body)
        key = self._key(credential)
        line = self._line(credential)
        arguments = {**self._arguments(request, headers), **self._connection(key, line)}
        try:
            async with asyncio.timeout(self._timeout.first_byte) as limit:
                reply = await self._library.litellm.acompletion(**arguments)
                if not request.get("stream"):
                    return WholeAnswer(200, completion_body(reply), headers=relayed(provider_headers(reply).items()))
                first = await first_of(reply)
        except asyncio.CancelledError:
            await line.abort()
            raise
        except Exception as error:  # noqa: BLE001 - whatever litellm raises becomes an answer or an error of Weir's
            await line.abort()
            if limit.expired():
                seconds = f"{self._timeout.first_byte:g} seconds"
                raise UpstreamTimeout(
                    f"Upstream {self._upstream.name!r} did not begin to answer within {seconds}."
                ) from None
            if line.empty:
                raise UpstreamEmpty(f"Upstream {self._upstream.name!r} answered 200 with an empty body.") from None
            return self._failed(error, key)
        return self._streamed(reply, first, line, key)

    def _streamed(self, reply: Any, first: Any, line: Any, key: str) -> StreamedAnswer:
        def explain(error: BaseException) -> Refusal | ProxyError:
            return self._reader.read(error, secret=key)

        async def abort() -> None:
            await line.abort()
            with contextlib.suppress(Exception):  # the stream is given up; how it ends is nobody's business
                await reply.aclose()

        return StreamedAnswer(
            reply,
            first,
            upstream=self._upstream.name,
            idle=self._timeout.idle,
            explain=explain,
            received=line.received,
            abort=abort,
        )

    def _failed(self, error: Exception, key: str) -> WholeAnswer:
        told = self._reader.read(error, secret=key)
        if isinstance(told, ProxyError):
            raise told from None
        return WholeAnswer(told.status, told.body(), headers=told.headers)

    def _key(self, credential: bytes) -> str:
        """The operator's key, else the caller's; never none, in whose place litellm would look into the environment."""
        if not self._upstream.passes_key:
            return self._upstream.api_key.get_secret_value()
        return credential.decode("latin-1") or _NO_KEY

    def _connection(self, key: str, line: Any) -> dict[str, Any]:
        """The arguments that say where and how to ask; the last word over whatever a client sent."""
        arguments: dict[str, Any] = {
            "api_key": key or None,
            "api_base": self._upstream.api_base,
            "timeout": self._timeout.first_byte,
            "num_retries": 0,
            "max_retries": 0,
            "_skip_mcp_handler": True,  # litellm's own MCP gateway; asking for it needs a package that is not here
        }
        if not self._compatible:
            handler = self._http.AsyncHTTPHandler
            arguments["client"] = handler(transport=line, timeout=self._timeout.first_byte, follow_redirects=False)
        return arguments

    def _arguments(self, request: dict[str, Any], headers: Headers) -> dict[str, Any]:
        """What litellm is called with, where and how to ask not included; InvalidRequest."""
        arguments = translated(request, provider=self._name, compatible=self._compatible, owned=self._owned)
        if copied := copied_headers(headers):
            arguments["extra_headers"] = copied
        return arguments

    def _line(self, credential: bytes) -> Any:
        """A line through the connections of one credential; two credentials share none."""
        pool = self._pools.get(credential)
        if pool is None:
            context = self._http.get_ssl_configuration()
            secure = isinstance(context, ssl.SSLContext)
            pool = self._pools[credential] = Pool(
                self._http.AsyncHTTPHandler.create_async_transport(
                    ssl_context=context if secure else None, ssl_verify=None if secure else context
                )
            )
        self._pools.move_to_end(credential)
        line = self._library.lines.Line(pool.transport, connect=self._timeout.connect)
        pool.lines.add(line)
        self._evict()
        return line

    def _evict(self) -> None:
        """Closes the pools used longest ago, above 256 of them, that have no answer under way."""
        surplus = max(0, len(self._pools) - _POOLS)
        idle = [credential for credential, pool in self._pools.items() if not any(line.busy for line in pool.lines)]
        for credential in idle[:surplus]:
            closing = asyncio.ensure_future(self._pools.pop(credential).transport.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes every connection."""
        pools = tuple(self._pools.values())
        self._pools.clear()
        for pool in pools:
            await pool.transport.aclose()
        if self._closing:
            await asyncio.wait(self._closing)
        await self._library.litellm.close_litellm_async_clients()


@dataclass(frozen=True, slots=True)
class Pool:
    """The connections of one credential, and the calls that use them."""

    transport: Any
    lines: WeakSet[Any] = field(default_factory=WeakSet)
