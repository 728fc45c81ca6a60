"""The shapes of what the management API tells beside conversations: policies, usage, the configuration, errors."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from proxy.routes.shapes import Count, Dollars, Moment, Tokens

Origin = Literal["preset", "file", "api"]

Policy = TypedDict(
    "Policy",
    {
        "name": str,
        "for": Annotated[str, Meta(description="what it is for, in a line")],
        "from": Origin,
        "default": bool,
        "mode": Literal["enforce", "observe", "off"],
        "cascade": list[str],
    },
)


class WholePolicy(Policy):
    """A policy with every value that holds; kept says where one that was just set is kept."""

    policy: Annotated[dict[str, Any], Meta(description="the words of the YAML file, every default included")]
    warnings: list[str]
    kept: NotRequired[Literal["database", "memory"]]


DeletedPolicy = TypedDict("DeletedPolicy", {"name": str, "deleted": Literal[True], "from": Origin | None})

Configuration = TypedDict(
    "Configuration",
    {
        "values": Annotated[dict[str, Any], Meta(description="every value that holds; secrets are ***")],
        "from": Annotated[dict[str, str], Meta(description="file and line of each value that is no default")],
        "policies": list[str],
        "warnings": list[str],
    },
)


class Taken(TypedDict):
    """What requests took, all together."""

    requests: Count
    failed: Annotated[int, Meta(ge=0, description="answered with a status of 400 or above, or not at all")]
    tokens_before: Annotated[int, Meta(ge=0, description="of answered requests as clients sent them")]
    tokens_after: Annotated[int, Meta(ge=0, description="of the same as they were forwarded")]
    tokens_saved: int
    prompt: Annotated[int, Meta(ge=0, description="tokens that upstreams reported")]
    cached: Tokens
    completion: Tokens
    priced: Annotated[int, Meta(ge=0, description="requests whose cost is known")]
    cost: Dollars | None
    cost_saved: Dollars | None
    summarizer_tokens: Tokens
    summarizer_cost: Dollars


class TakenBy(Taken):
    """What the requests of one key took, or of one group of them."""

    tenant: str
    key: Annotated[str | None, Meta(description="name of the key, null for one that Weir does not know")]
    group: Annotated[str | None, Meta(description="the model, policy, day or conversation, null where by is not given")]
    first: Moment
    last: Moment


class Usage(TypedDict):
    """What requests took since a moment."""

    since: Moment
    by: Literal["model", "policy", "day", "conversation"] | None
    total: Taken
    data: list[TakenBy]
    next: str | None


class Fault(TypedDict):
    """What is wrong; param names the parameter or field, weir says what there is."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "permission_error", "requests"]
    param: str | None
    code: Literal[
        "invalid_request", "invalid_json", "invalid_api_key", "request_too_large", "rate_limit_exceeded", "internal"
    ]
    weir: NotRequired[dict[str, Any]]


class Error(TypedDict):
    """An error in OpenAI's shape."""

    error: Fault
