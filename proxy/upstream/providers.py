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
import json
import logging
import os
import re
import ssl
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from proxy.config import UpstreamSettings
from proxy.errors import InvalidJSON, InvalidRequest, ProxyError, UpstreamTimeout
from proxy.upstream.litellm_answer import (
    StreamedAnswer,
    WholeAnswer,
    completion_body,
    is_invented_end,
    provider_headers,
)
from proxy.upstream.litellm_failure import Library, Reader, Refusal, relayed
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
    "enable_anthropic_prompt_caching": False,
    "REPEATED_STREAMING_CHUNK_LIMIT": sys.maxsize,
}
_CALLBACKS = ("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback")
_LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")

_STANDARD = frozenset(
    {
        *("messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls"),
        *("functions", "function_call", "temperature", "top_p", "n", "stop", "seed", "user"),
        *("max_tokens", "max_completion_tokens", "modalities", "prediction", "audio", "response_format"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
        *("reasoning_effort", "verbosity", "thinking", "web_search_options", "service_tier"),
        *("safety_identifier", "store", "prompt_cache_key", "prompt_cache_retention", "context_management"),
    }
)
"""The fields of a chat request that litellm takes by name and translates."""

_NOT_A_FIELD = re.compile(
    r"_.*|(?:litellm|mock|aws|azure|vertex|google|gcp|gcs|s3|watsonx|wx|oci|sap|databricks|snowflake|sagemaker)_.*"
    r"|.*(?:api_|base_url|endpoint|credential|secret|password|access_token|token_file|proxy|header|callback).*"
    r"|(?:json_mode|is_vertex_request|deployment_id|model_list|shared_session|client|timeout|project|region|location"
    r"|organization|drop_params|additional_drop_params|enable_json_schema_validation)"
)
"""Names that steer litellm or its connection in one of its providers, so that no client may set them."""

_COPIED = frozenset({b"traceparent", b"tracestate", b"anthropic-beta", b"http-referer", b"x-title"})
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
    return Library(litellm, importlib.import_module("httpx"), importlib.import_module("openai"))


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

        Raises UpstreamUnreachable, UpstreamTimeout, InvalidRequest.
        """
        request = _decoded(body)
        key = self._key(credential)
        line = self._line(credential)
        arguments = {**self._arguments(request, headers), **self._connection(key, line)}
        try:
            async with asyncio.timeout(self._timeout.first_byte) as limit:
                reply = await self._library.litellm.acompletion(**arguments)
                if not request.get("stream"):
                    return WholeAnswer(200, completion_body(reply), headers=relayed(provider_headers(reply).items()))
                first = await anext(reply)
        except asyncio.CancelledError:
            await line.abort()
            raise
        except StopAsyncIteration:
            raise self._reader.nothing_came() from None
        except Exception as error:  # noqa: BLE001 - whatever litellm raises becomes an answer or an error of Weir's
            await line.abort()
            if limit.expired():
                seconds = f"{self._timeout.first_byte:g} seconds"
                raise UpstreamTimeout(
                    f"Upstream {self._upstream.name!r} did not begin to answer within {seconds}."
                ) from None
            return self._failed(error, key)
        if is_invented_end(reply, first):
            await line.abort()
            raise self._reader.nothing_came()
        return self._streamed(reply, first, line, key)

    def _streamed(self, reply: Any, first: Any, line: "Line", key: str) -> StreamedAnswer:
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

    def _connection(self, key: str, line: "Line") -> dict[str, Any]:
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
        """The client's fields as litellm takes them: by name what it translates, all others as they are."""
        fields = {name: value for name, value in request.items() if value is not None}
        model = str(fields.pop("model", ""))
        prefix = f"{self._name}/"
        arguments: dict[str, Any] = {"model": model if model.startswith(prefix) else prefix + model}
        arguments |= {name: fields.pop(name) for name in _STANDARD & fields.keys()}
        if copied := _copied(headers):
            arguments["extra_headers"] = copied
        if self._compatible:
            return {**arguments, "extra_body": fields} if fields else arguments
        metadata = fields.pop("metadata", None)
        if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
            arguments["metadata"] = {"user_id": metadata["user_id"]}
        for name in fields:
            if _NOT_A_FIELD.fullmatch(name) or self._owned(name):
                text = f"The field {name[:80]!r} cannot be sent to upstream {self._upstream.name!r}."
                raise InvalidRequest(text, param=name[:80])
        return {**arguments, **fields}

    def _line(self, credential: bytes) -> "Line":
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
        line = Line(pool.transport, self._library.httpx, connect=self._timeout.connect)
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
    lines: "WeakSet[Line]" = field(default_factory=WeakSet)


class Line:
    """One call's way to the provider: never taken twice, and can be broken off.

    It stands in the place of an httpx transport. litellm asks again, on a new connection, after a connection was lost
    with a request on it; here that error looks like one of those after which it does not.
    """

    def __init__(self, pool: Any, httpx: Any, *, connect: float) -> None:
        self._pool = pool
        self._httpx = httpx
        self._timeout = {"connect": connect, "read": None, "write": None, "pool": None}
        self._response: Any = None
        self._asking = True

    @property
    def busy(self) -> bool:
        """Whether a response is awaited or under way."""
        return self._asking if self._response is None else not self._response.is_closed

    async def handle_async_request(self, request: Any) -> Any:
        """The provider's response, its body unread."""
        request.extensions = {**request.extensions, "timeout": self._timeout}
        try:
            self._response = await self._pool.handle_async_request(request)
        except (self._httpx.ConnectError, self._httpx.RemoteProtocolError) as error:
            self._asking = False
            raise self._httpx.NetworkError("connection lost", request=request) from error
        return self._response

    async def aclose(self) -> None:
        """Nothing: the connections outlive the call."""

    def received(self) -> int:
        """Bytes of the response's body that have come so far."""
        return self._response.num_bytes_downloaded if self._response is not None else 0

    async def abort(self) -> None:
        """End the response; at once, with its connection, unless it has come to its end."""
        self._asking = False
        if self._response is not None:
            with contextlib.suppress(Exception):  # it is given up; how it ends is nobody's business
                await self._response.aclose()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidJSON("The body is not JSON.") from None
    if not isinstance(request, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return request


def _copied(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The client's headers that go on: where its trace stands, and what it wants of the provider."""
    lowered = ((name.lower(), value) for name, value in headers)
    return {name.decode(): value.decode("latin-1") for name, value in lowered if name in _COPIED}
