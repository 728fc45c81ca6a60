"""A chat request of OpenAI's protocol as arguments of litellm; nothing in it may steer litellm itself."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from proxy.errors import InvalidJSON, InvalidRequest

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


def decoded(body: bytes) -> dict[str, Any]:
    """The request as Python values; InvalidJSON, InvalidRequest."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidJSON("The body is not JSON.") from None
    if not isinstance(request, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return request


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


def copied_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The client's headers that go on: where its trace stands, and what it wants of the provider."""
    lowered = ((name.lower(), value) for name, value in headers)
    return {name.decode(): value.decode("latin-1") for name, value in lowered if name in _COPIED}
