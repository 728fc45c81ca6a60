"""Policies and the configuration: shown to whoever may see them; the operator may set a policy while Weir runs."""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from proxy.config.file import ConfigError, Document, dotted
from proxy.config.loading import public, without_set_policy
from proxy.config.presets import (
    SetPolicy,
    about,
    policy_values,
    policy_warnings,
    preset_documents,
    read_policy,
    with_policy,
)
from proxy.config.values import Config
from proxy.errors import InvalidRequest, NotFound, ProxyError
from proxy.http.request import ManagementAnswer, ManagementRequest, Page, Shape, as_json, page_of_whole
from proxy.runtime import Runtime
from proxy.store.records import StoreError
from proxy.stream import read_body

MAX_POLICY = 256 * 1024
MAX_SCOPE_LEN = 1_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLISHED_ELSEWHERE = frozenset({"policies", "warnings"})
Origin = Literal["preset", "file", "api"]


class Policy(Shape):
    """A policy in a line."""

    name: str
    purpose: Annotated[str, Meta(description="what it is for, in a line")] = msgspec.field(name="for")
    origin: Origin = msgspec.field(name="from")
    default: bool
    mode: Literal["enforce", "observe", "off"]
    cascade: list[str]


class WholePolicy(Policy):
    """A policy with every value that holds; kept says where one that was just set is kept."""

    policy: Annotated[dict[str, Any], Meta(description="the words of the YAML file, every default included")]
    warnings: list[str]
    kept: Literal["database", "memory"] | UnsetType = UNSET


class DeletedPolicy(Shape):
    """That it is gone, and from where the one of its name is that holds now."""

    name: str
    deleted: Literal[True]
    origin: Origin | None = msgspec.field(name="from")


class Configuration(Shape):
    """The configuration that holds."""

    values: Annotated[dict[str, Any], Meta(description="every value that holds; secrets are ***")]
    places: Annotated[dict[str, str], Meta(description="file and line of each value that is no default")] = (
        msgspec.field(name="from")
    )
    policies: list[str]
    warnings: list[str]


async def config(asked: ManagementRequest) -> Configuration:
    """Every value of the configuration that holds, secrets as ``***``, and where each came from; without policies."""
    effective = asked.runtime.config
    values = public(effective)
    assert isinstance(values, dict)  # noqa: S101 - public() makes a dict of a dataclass
    return Configuration(
        values={name: value for name, value in values.items() if name not in PUBLISHED_ELSEWHERE},
        places={dotted(at): where for at, where in effective.places.items()},
        policies=list(effective.policies),
        warnings=list(effective.warnings),
    )


class LearnedWindow(Shape):
    """A window that an upstream's own refusals have taught, of a model behind a credential."""

    scope: Annotated[str, Meta(description="origin, a hash of the credential or a dash, model")]
    limit: Annotated[int, Meta(ge=1, description="tokens")]
    seen: Annotated[int, Meta(ge=1, description="refusals that have said so")]
    expires: Annotated[float, Meta(description="seconds since 1970, UTC")]


class Scope(Shape):
    """Which learned window is to be forgotten."""

    scope: Annotated[str, Meta(min_length=1, max_length=MAX_SCOPE_LEN)]


class ForgottenWindow(Shape):
    """The window that is not known any more."""

    forgotten: str


async def windows(asked: ManagementRequest) -> Page[LearnedWindow]:
    """The windows that upstreams have taught this process, and that still hold."""
    wanted = asked.limit(), asked.after(str)
    rows = sorted(asked.runtime.windows.learned(), key=lambda row: row.scope)
    return page_of_whole(rows, wanted, LearnedWindow.of, lambda row: (row.scope,))


async def forget_window(asked: ManagementRequest) -> ForgottenWindow:
    """Forget a learned window: what the configuration, the upstream or the tables say holds again.

    Other processes go on with it until it expires.
    """
    scope = (await asked.fields(("scope",))).get("scope")
    if not isinstance(scope, str) or not scope or len(scope) > MAX_SCOPE_LEN:
        raise InvalidRequest("scope must be that of a learned window, as their list has it.", param="scope")
    is_known = any(row.scope == scope for row in asked.runtime.windows.learned())
    asked.runtime.windows.forget(scope)
    if not await asked.store.forget_limit(scope) and not is_known:
        raise NotFound(f"No window was learned of {scope[:80]!r}.")
    return ForgottenWindow(forgotten=scope)


async def listing(asked: ManagementRequest) -> Page[Policy]:
    """Every policy that there is, in a line each."""
    wanted = asked.limit(), asked.after(str)
    runtime, presets = asked.runtime, preset_documents()
    names = list(runtime.config.policies)
    return page_of_whole(names, wanted, lambda name: Policy(**_row(runtime, name, presets)), lambda name: (name,))


async def one(asked: ManagementRequest) -> WholePolicy:
    """One policy with every value that holds, and what is doubtful in it."""
    name = asked.path["name"]
    if name not in asked.runtime.config.policies:
        raise NotFound(f"There is no policy {name[:80]!r}.")
    return _whole(asked.runtime, name)


async def put(asked: ManagementRequest) -> ManagementAnswer:
    """Set a policy for the next request on, and keep it in the database; the body is its YAML or JSON."""
    runtime, name = asked.runtime, asked.path["name"]
    if not NAME.fullmatch(name):
        text = "A policy's name has up to 64 letters, digits, dots, dashes and underscores."
        raise InvalidRequest(text, param="name")
    try:
        text = (await read_body(asked.receive, limit=MAX_POLICY)).decode("utf-8")
        if not text.strip():
            raise InvalidRequest("The body must be a policy, in YAML or JSON: preset: balanced.", param="body")
        body = await asyncio.to_thread(_read, runtime.config, name, text)
    except UnicodeDecodeError:
        raise InvalidRequest("The policy is not UTF-8.", param="body") from None
    except ConfigError as error:
        problems = list(error.problems)
        raise InvalidRequest("; ".join(problems), param="body", weir={"problems": problems}) from None
    known = name in runtime.config.policies
    before = _origin(runtime, name) if known else "nothing"
    policy = SetPolicy(name, text, runtime.planner.clock(), body)
    kept = await _keep(runtime, policy)
    runtime.set_policy(policy)
    runtime.logger.info("policy %s was set over HTTP by the admin, before it was from: %s", name, before)
    return as_json(_whole(runtime, name, kept=kept), status=200 if known else 201)


async def delete(asked: ManagementRequest) -> DeletedPolicy:
    """Remove a policy that was set over HTTP: the file's policy of that name, or the preset, holds again."""
    runtime, name = asked.runtime, asked.path["name"]
    if name not in runtime.set_policies or _origin(runtime, name) != "api":
        raise NotFound(f"No policy {name[:80]!r} was set over HTTP; the file's and presets are not removed here.")
    try:
        restored = await asyncio.to_thread(without_set_policy, runtime.config, name)
    except ConfigError as error:
        text = f"The file's policy {name} would hold again, and is not valid: {'; '.join(error.problems)}"
        raise InvalidRequest(text, weir={"problems": list(error.problems)}) from None
    try:
        await runtime.store.delete_policy(name, runtime.planner.clock())
    except StoreError as error:
        runtime.logger.error("policy %s could not be removed from the database: %s", name, error)
        raise ProxyError("The database cannot be written now: the policy still holds.") from None
    runtime.set_policies[name] = SetPolicy(name, "", runtime.planner.clock(), None)
    runtime.adopt(restored)
    left = _origin(runtime, name) if name in restored.policies else None
    runtime.logger.info("policy %s of the API was removed by the admin, now it is from: %s", name, left or "nothing")
    return DeletedPolicy(name=name, deleted=True, origin=left)


def _read(config: Config, name: str, text: str) -> Mapping[str, object]:
    body = read_policy(name, text)
    with_policy(config, name, body)
    return body


async def _keep(runtime: Runtime, policy: SetPolicy) -> Literal["database", "memory"]:
    try:
        await runtime.store.save_policy(policy.name, policy.text, policy.at)
    except StoreError as error:
        runtime.logger.error("the policy %s could not be stored, it holds in memory: %s", policy.name, error)
        return "memory"
    return "database"


def _origin(runtime: Runtime, name: str) -> Origin:
    given = runtime.set_policies.get(name)
    if given is not None and given.body is not None:
        return "api"
    return "file" if ("policies", name) in runtime.config.places else "preset"


def _row(runtime: Runtime, name: str, presets: Mapping[str, Document]) -> dict[str, Any]:
    given, settings = runtime.set_policies.get(name), runtime.config.policy(name)
    document = presets.get(name, Document(name=name))
    if given is not None and given.body is not None:
        document = Document(name=name, data=given.body)
    return {
        "name": name,
        "purpose": about(document),
        "origin": _origin(runtime, name),
        "default": name == runtime.config.default_policy,
        "mode": str(settings.mode),
        "cascade": [layer.strategy for layer in settings.layers],
    }


def _whole(runtime: Runtime, name: str, *, kept: Literal["database", "memory"] | UnsetType = UNSET) -> WholePolicy:
    settings = runtime.config.policy(name)
    row, warnings = _row(runtime, name, preset_documents()), list(policy_warnings(settings))
    return WholePolicy(**row, policy=policy_values(settings), warnings=warnings, kept=kept)
