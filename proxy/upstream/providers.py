"""An upstream that litellm speaks to.

litellm takes seconds and 165 MB to import: that is done at the start, and only where an upstream needs it. It
translates and does nothing else that it could: no network for a table, no ``.env``, no callbacks, no log, no
repetition, no redirect, no credential from the environment on a caller's behalf. A client's body never becomes its
arguments: by ``api_base`` or ``fallbacks`` a client could have the operator's key sent elsewhere (CVE-2024-6587).
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from proxy.access.destination import Headers
from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidJSON, InvalidRequest, ProxyError, UpstreamEmpty, UpstreamTimeout
from proxy.upstream.connection import Answer, Pools
from proxy.upstream.litellm_answer import (
    Library,
    Reader,
    StreamedAnswer,
    WholeAnswer,
    completion_body,
    first_of,
    provider_headers,
)

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


def providers_for(upstreams: Iterable[UpstreamSettings]) -> "dict[str, LitellmProvider]":
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
        self._pools: Pools[bytes, _ProviderPool] = Pools(
            make=self._pool, busy=lambda pool: any(line.busy for line in pool.lines), close=_ProviderPool.close
        )

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        """The answer to a chat request, its first chunk read if it is a stream, so that its status is the true one.

        Raises UpstreamUnreachable, UpstreamTimeout, UpstreamEmpty, InvalidRequest.
        """
        request = _decoded(body)
        key = self._key(credential)
        line = self._line(credential)
        arguments = _translated(request, provider=self._name, compatible=self._compatible, owned=self._owned)
        if copied := _copied_headers(headers):
            arguments["extra_headers"] = copied
        arguments |= self._connection(key, line)
        try:
            async with asyncio.timeout(self._timeout.first_byte) as limit:
                reply = await self._library.litellm.acompletion(**arguments)
                if not request.get("stream"):
                    return WholeAnswer(200, completion_body(reply), headers=provider_headers(reply))
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
            told = self._reader.read(error, secret=key)
            if isinstance(told, ProxyError):
                raise told from None
            return told
        return StreamedAnswer(reply, first, line=line, reader=self._reader, secret=key, idle=self._timeout.idle)

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

    def _pool(self) -> "_ProviderPool":
        context = self._http.get_ssl_configuration()
        secure = isinstance(context, ssl.SSLContext)
        return _ProviderPool(
            self._http.AsyncHTTPHandler.create_async_transport(
                ssl_context=context if secure else None, ssl_verify=None if secure else context
            )
        )

    def _line(self, credential: bytes) -> Any:
        pool = self._pools.of(credential)
        line = self._library.lines.LiteLLMLine(pool.transport, connect=self._timeout.connect)
        pool.lines.add(line)
        return line

    async def close(self) -> None:
        await self._pools.close()
        await self._library.litellm.close_litellm_async_clients()


@dataclass(frozen=True, slots=True)
class _ProviderPool:
    transport: Any
    lines: WeakSet[Any] = field(default_factory=WeakSet)

    async def close(self) -> None:
        await self.transport.aclose()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidJSON("The body is not JSON.") from None
    if not isinstance(request, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return request


def _translated(
    request: dict[str, Any], *, provider: str, compatible: bool, owned: Callable[[str], bool]
) -> dict[str, Any]:
    """The client's fields as litellm takes them: by name what it translates, all others as they are.

    A ``compatible`` provider speaks OpenAI's protocol after all; ``owned`` knows the names that litellm keeps for
    itself. Raises InvalidRequest for a field that cannot be sent on.
    """
    fields = {name: value for name, value in request.items() if value is not None}
    model = str(fields.pop("model", ""))
    prefix = f"{provider}/"
    arguments: dict[str, Any] = {"model": model if model.startswith(prefix) else prefix + model}
    arguments |= {name: fields.pop(name) for name in _STANDARD & fields.keys()}
    if compatible:
        return {**arguments, "extra_body": fields} if fields else arguments
    metadata = fields.pop("metadata", None)
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        arguments["metadata"] = {"user_id": metadata["user_id"]}
    for name in fields:
        if _NOT_A_FIELD.fullmatch(name) or owned(name):
            text = f"The field {name[:80]!r} cannot be sent to the provider {provider!r}."
            raise InvalidRequest(text, param=name[:80])
    return {**arguments, **fields}


def _copied_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    lowered = ((name.lower(), value) for name, value in headers)
    return {name.decode(): value.decode("latin-1") for name, value in lowered if name in _COPIED}
