"""An upstream that litellm speaks to.

litellm takes seconds and 165 MB to import: that is done at the start, and only where an upstream needs it. It
translates and does nothing else that it could: no network for a table, no ``.env``, no callbacks, no log, no
repetition, no redirect, no credential from the environment on a caller's behalf. A client's body never becomes its
arguments: by ``api_base`` or ``fallbacks`` a client could have the operator's key sent elsewhere (CVE-2024-6587).
"""

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from proxy.access.destination import Headers
from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidRequest
from proxy.upstream.connection import Answer

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

SDK = frozenset({"openai", "azure", "azure_text", "text-completion-openai", "custom_openai", "mistral", "openrouter"})
NO_KEY = "no-key"
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


class LitellmProvider(Protocol):
    """One upstream of kind ``litellm``; what it is made of is loaded with litellm."""

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        """The answer to a chat request, its first chunk read if it is a stream, so that its status is the true one.

        Raises UpstreamUnreachable, UpstreamTimeout, UpstreamEmpty, InvalidRequest.
        """

    async def close(self) -> None: ...


def providers_for(upstreams: Iterable[UpstreamSettings]) -> dict[str, LitellmProvider]:
    """A provider for each upstream of kind ``litellm``, by the upstream's name; imports litellm if there is one.

    It changes the process's environment (``LITELLM_…``) so that the import asks no network.
    """
    wanted = [upstream for upstream in upstreams if upstream.kind == "litellm"]
    if not wanted:
        return {}
    litellm = _load()
    for provider in {str(upstream.provider) for upstream in wanted}:
        _rehearse(litellm, provider)
    calls = importlib.import_module("proxy.upstream.litellm")
    return {upstream.name: calls.LitellmCalls(upstream, litellm=litellm) for upstream in wanted}


def _load() -> Any:
    os.environ.update(_ENVIRONMENT)
    litellm = importlib.import_module("litellm")  # costs seconds and 165 MB: only where an upstream needs it
    for name, value in _SWITCHES.items():
        setattr(litellm, name, value)
    for name in _CALLBACKS:
        setattr(litellm, name, [])
    for name in _LOGGERS:
        logging.getLogger(name).disabled = True
    return litellm


def _rehearse(litellm: Any, provider: str) -> None:
    message = {"role": "user", "content": "-"}
    with contextlib.suppress(Exception):  # the first request will say what is wrong with the provider
        litellm.completion(
            f"{provider}/-", messages=[message], api_key=NO_KEY, mock_response="-", _skip_mcp_handler=True
        )
        importlib.import_module("litellm.litellm_core_utils.default_encoding")


def translated(
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


def copied_headers(headers: Headers) -> dict[str, str]:
    lowered = ((name.lower(), value) for name, value in headers)
    return {name.decode(): value.decode("latin-1") for name, value in lowered if name in _COPIED}
