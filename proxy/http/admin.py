"""What an operator sees and changes: keys, policies, learned windows, and the configuration.

A caller with a key sees policies; the rest is for the operator.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from starlette.responses import Response

from proxy.access.admission import LIMITS, create_secret, key_digest, key_limits
from proxy.access.budgets import key_budgets
from proxy.config.file import ConfigError, Document, dotted, nearest
from proxy.config.loading import without_set_policy
from proxy.config.presets import (
    SetPolicy,
    about,
    policy_values,
    policy_warnings,
    preset_documents,
    read_policy,
    with_policy,
)
from proxy.config.values import Config, Permission, public
from proxy.errors import InvalidRequest, NotFound, ProxyError
from proxy.http.request import (
    DAYS,
    DOLLAR_DIGITS,
    Json,
    ManagementRequest,
    as_json,
    fields_of,
    page_of_whole,
)
from proxy.http.routes import PAGED, ManagementRoute
from proxy.runtime import Runtime
from proxy.store.records import DAY, KeyRow, NameTaken, StoreError

MAX_KEY_NAME = 100
MAX_MODELS = 100
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)


async def keys(request: ManagementRequest) -> Json:
    """Every key, revoked ones included, with what it may, and its use in the last 30 days; no
    secrets.
    """
    wanted = (request.limit(), request.after(str))
    runtime = request.runtime
    made = await request.store.list_keys()
    used = {
        row.tenant: row
        for row in await request.store.usage(None, since=runtime.planner.clock() - DAYS * DAY)
    }
    stated: dict[str, KeyRow] = {}
    for each in runtime.config.keys:
        digest = key_digest(runtime.secret, each.secret.get_secret_value().encode())
        same = {
            name: getattr(each, name) for name in ("name", "policy", "models", "allow", *LIMITS)
        }
        texts = tuple(map(str, each.budgets))
        stated[digest] = KeyRow(digest=digest, created=0, team=each.team, budgets=texts, **same)

    def shown(row: KeyRow) -> Json:
        tenant = row.tenant or row.digest[:32]
        took = used.get(tenant)
        return {
            **_limited(row),
            **_budgeted(row),
            "tenant": tenant,
            "origin": "file" if row.digest in stated else "database",
            "policy": row.policy,
            "models": list(row.models),
            "allow": list(row.allow),
            "created": row.created or None,
            "revoked": row.revoked,
            "last_used": None if took is None else took.last,
            "requests": 0 if took is None else took.requests,
            "tokens_after": 0 if took is None else took.tokens_after,
            "cost": None if took is None or not took.priced else round(took.cost, DOLLAR_DIGITS),
        }

    rows = [*stated.values(), *(row for row in made if row.digest not in stated)]
    return page_of_whole(rows, wanted, shown, lambda row: (row.name,))


def _limited(row: KeyRow) -> Json:
    return {
        name: getattr(row, name)
        for name in ("name", "concurrency", "requests_per_minute", "tokens_per_minute", "expires")
    }


def _budgeted(row: KeyRow) -> Json:
    return {"team": row.team, "budgets": list(row.budgets or ())}


async def create_key(request: ManagementRequest) -> Json:
    """Make a key. Its secret is told this once; from the first key on only known keys may call."""
    given = await request.fields((*LIMITS, "name", "policy", "models", "allow", "team", "budgets"))
    secret = create_secret()
    row = _new_key(request, given, digest=key_digest(request.runtime.secret, secret.encode()))
    try:
        await request.store.add_key(row)
    except NameTaken:
        raise _taken(row.name) from None
    request.runtime.take_keys(await request.store.list_keys())
    return _made(row, secret)


async def rotate_key(request: ManagementRequest) -> Json:
    """Give a key another secret, told this once; what was the old one's, conversations and usage,
    is the new one's.
    """
    await request.fields(())
    old = await _in_force(request)
    secret = create_secret()
    at = request.runtime.planner.clock()
    await request.store.rotate_key(
        old.name, key_digest(request.runtime.secret, secret.encode()), at=at, until=at
    )
    request.runtime.take_keys(await request.store.list_keys())
    return _made(old, secret)


async def limit_key(request: ManagementRequest) -> Json:
    """Set some of a key's limits, from its next request on; those that are not given stay."""
    given = await request.fields(LIMITS)
    old = await _in_force(request)
    at = request.runtime.planner.clock()
    limits = key_limits(given, now=at)
    if limits:
        await request.store.change_key(old.name, limits, at)
        request.runtime.take_keys(await request.store.list_keys())
    return _limited(await _in_force(request))


async def set_key_budgets(request: ManagementRequest) -> Json:
    """Set a key's team, its budgets or both, from its next request on; what is not given stays.

    What it has used in this period stays used.
    """
    given = await request.fields(("team", "budgets"))
    values = key_budgets(given, request.runtime.config.teams)
    old = await _in_force(request)
    if values:
        at = request.runtime.planner.clock()
        await request.store.change_key(old.name, values, at, change="budgets")
        request.runtime.take_keys(await request.store.list_keys())
    return {"name": old.name, **_budgeted(await _in_force(request))}


async def set_key_policy(request: ManagementRequest) -> Json:
    """Give a key another policy from its next request on, null for the default one; all else of it
    stays.
    """
    given = await request.fields(("policy",))
    policy = _policy_in(request, given)
    old = await _in_force(request)
    at = request.runtime.planner.clock()
    await request.store.change_key(old.name, {"policy": policy}, at, change="policy")
    request.runtime.take_keys(await request.store.list_keys())
    return {"name": old.name, "policy": policy}


async def revoke_key(request: ManagementRequest) -> Json:
    """Revoke a key: its next request is refused. One of the file is taken out of the file
    instead.
    """
    old = await _in_force(request)
    at = request.runtime.planner.clock()
    await request.store.revoke_key(old.name, at)
    request.runtime.take_keys(await request.store.list_keys())
    return {"name": old.name, "revoked": at}


async def _in_force(request: ManagementRequest) -> KeyRow:
    name = request.path["key"]
    rows = await request.store.list_keys()
    for row in rows:
        if row.name == name and row.revoked is None:
            return row
    if any(each.name == name for each in request.runtime.config.keys):
        raise InvalidRequest(
            f"The key {name[:80]!r} stands in the configuration's file: change it there.",
            param="key",
        )
    known = sorted(row.name for row in rows if row.revoked is None)
    raise NotFound(f"There is no key {name[:80]!r}{nearest(name, known)}.")


def _made(row: KeyRow, secret: str) -> Json:
    made = {
        "secret": secret,
        "policy": row.policy,
        "models": list(row.models),
        "allow": list(row.allow),
    }
    return _limited(row) | _budgeted(row) | made


def _new_key(request: ManagementRequest, given: dict[str, Any], *, digest: str) -> KeyRow:
    name = given.get("name")
    if (
        not isinstance(name, str)
        or not name.strip()
        or len(name) > MAX_KEY_NAME
        or not name.isprintable()
    ):
        raise InvalidRequest(f"name must be 1 to {MAX_KEY_NAME} characters.", param="name")
    if name.strip() in [key.name for key in request.runtime.config.keys]:
        raise _taken(name.strip())
    policy = _policy_in(request, given)
    models = _words(given, "models")
    allow = _words(given, "allow")
    for word in allow:
        if word not in PERMISSIONS:
            raise InvalidRequest(f"allow may have {', '.join(PERMISSIONS)}.", param="allow")
    now = request.runtime.planner.clock()
    limits: dict[str, Any] = key_limits(given, now=now)
    limits |= key_budgets(given, request.runtime.config.teams)
    return KeyRow(
        name=name.strip(),
        digest=digest,
        policy=policy,
        models=models,
        allow=allow,
        created=now,
        **limits,
    )


def _policy_in(request: ManagementRequest, given: dict[str, Any]) -> str | None:
    policy = given.get("policy")
    known = list(request.runtime.config.policies)
    if policy is None or (isinstance(policy, str) and policy in known):
        return policy
    hint = nearest(policy, known) if isinstance(policy, str) else ""
    raise InvalidRequest(f"There is no policy {str(policy)[:80]!r}{hint}.", param="policy")


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"There is a key {name!r} already, or was one: take another name.", param="name"
    )


def _words(given: dict[str, Any], name: str) -> tuple[str, ...]:
    found = given.get(name, [])
    is_list = isinstance(found, list) and len(found) <= MAX_MODELS
    if not is_list or not all(isinstance(each, str) and each.strip() for each in found):
        raise InvalidRequest(f"{name} must be a list of words.", param=name)
    return tuple(dict.fromkeys(each.strip() for each in found))


MAX_POLICY = 256 * 1024
MAX_SCOPE_LEN = 1_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLISHED_ELSEWHERE = frozenset({"policies", "warnings"})
Origin = Literal["preset", "file", "api"]


async def config(request: ManagementRequest) -> Json:
    """Every value of the configuration that holds, secrets as ``***``, and where each came from;
    without policies.
    """
    effective = request.runtime.config
    values = await asyncio.to_thread(public, effective)  # the first call makes its schema
    return {
        "values": {
            name: value for name, value in values.items() if name not in PUBLISHED_ELSEWHERE
        },
        "from": {dotted(at): where for at, where in effective.places.items()},
        "policies": list(effective.policies),
        "warnings": list(effective.warnings),
    }


async def windows(request: ManagementRequest) -> Json:
    """The limits that upstreams have taught this process, and that still hold."""
    wanted = request.limit(), request.after(str, str)
    rows = sorted(request.runtime.limits_resolver.learned(), key=lambda row: (row.scope, row.kind))
    return page_of_whole(rows, wanted, fields_of, lambda row: (row.scope, row.kind))


async def forget_window(request: ManagementRequest) -> Json:
    """Forget what was learned of a scope: what the configuration, the upstream or the tables say
    holds again.

    Other processes go on with it until it expires.
    """
    scope = (await request.fields(("scope",))).get("scope")
    if not isinstance(scope, str) or not scope or len(scope) > MAX_SCOPE_LEN:
        raise InvalidRequest(
            "scope must be that of a learned window, as their list has it.", param="scope"
        )
    is_known = any(row.scope == scope for row in request.runtime.limits_resolver.learned())
    request.runtime.limits_resolver.forget(scope)
    if not await request.store.forget_limit(scope) and not is_known:
        raise NotFound(f"No window was learned of {scope[:80]!r}.")
    return {"forgotten": scope}


async def policies(request: ManagementRequest) -> Json:
    """Every policy that there is, in a line each."""
    wanted = request.limit(), request.after(str)
    runtime = request.runtime
    presets = preset_documents()
    names = list(runtime.config.policies)
    return page_of_whole(
        names, wanted, lambda name: _line(runtime, name, presets), lambda name: (name,)
    )


async def policy(request: ManagementRequest) -> Json:
    """One policy with every value that holds, and what is doubtful in it."""
    name = request.path["name"]
    if name not in request.runtime.config.policies:
        raise NotFound(f"There is no policy {name[:80]!r}.")
    return _whole(request.runtime, name)


async def put_policy(request: ManagementRequest) -> Json | Response:
    """Set a policy for the next request on, and keep it in the database; the body is its YAML or
    JSON.
    """
    runtime = request.runtime
    name = request.path["name"]
    if not NAME.fullmatch(name):
        text = "A policy's name has up to 64 letters, digits, dots, dashes and underscores."
        raise InvalidRequest(text, param="name")
    try:
        text = (await request.body(MAX_POLICY)).decode("utf-8")
        if not text.strip():
            raise InvalidRequest(
                "The body must be a policy, in YAML or JSON: preset: balanced.", param="body"
            )
        body = await asyncio.to_thread(_read_policy, runtime.config, name, text)
    except UnicodeDecodeError:
        raise InvalidRequest("The policy is not UTF-8.", param="body") from None
    except ConfigError as error:
        problems = list(error.problems)
        raise InvalidRequest(
            "; ".join(problems), param="body", weir={"problems": problems}
        ) from None
    known = name in runtime.config.policies
    before = _origin_of(runtime, name) if known else "nothing"
    policy = SetPolicy(name, text, runtime.planner.clock(), body)
    kept = await _keep_policy(runtime, policy)
    runtime.set_policy(policy)
    runtime.logger.info(
        "policy %s was set over HTTP by the admin, before it was from: %s", name, before
    )
    whole = _whole(runtime, name, kept=kept)
    return whole if known else as_json(whole, status=201)


async def delete_policy(request: ManagementRequest) -> Json:
    """Remove a policy that was set over HTTP: the file's policy of that name, or the preset, holds
    again.
    """
    runtime = request.runtime
    name = request.path["name"]
    if name not in runtime.set_policies or _origin_of(runtime, name) != "api":
        raise NotFound(
            f"No policy {name[:80]!r} was set over HTTP; the file's and presets are not removed"
            " here."
        )
    restored = without_set_policy(runtime.config, name)
    try:
        await runtime.store.delete_policy(name, runtime.planner.clock())
    except StoreError as error:
        runtime.logger.error("policy %s could not be removed from the database: %s", name, error)
        raise ProxyError("The database cannot be written now: the policy still holds.") from None
    runtime.set_policies[name] = SetPolicy(name, "", runtime.planner.clock(), None)
    runtime.adopt(restored)
    left = _origin_of(runtime, name) if name in restored.policies else None
    runtime.logger.info(
        "policy %s of the API was removed by the admin, now it is from: %s", name, left or "nothing"
    )
    return {"name": name, "deleted": True, "from": left}


def _read_policy(config: Config, name: str, text: str) -> Mapping[str, object]:
    body = read_policy(name, text)
    with_policy(config, name, body)
    return body


async def _keep_policy(runtime: Runtime, policy: SetPolicy) -> Literal["database", "memory"]:
    try:
        await runtime.store.save_policy(policy.name, policy.text, policy.at)
    except StoreError as error:
        runtime.logger.error(
            "the policy %s could not be stored, it holds in memory: %s", policy.name, error
        )
        return "memory"
    return "database"


def _origin_of(runtime: Runtime, name: str) -> Origin:
    given = runtime.set_policies.get(name)
    if given is not None and given.body is not None:
        return "api"
    return "file" if ("policies", name) in runtime.config.places else "preset"


def _line(runtime: Runtime, name: str, presets: Mapping[str, Document]) -> dict[str, Any]:
    given = runtime.set_policies.get(name)
    settings = runtime.config.policy(name)
    document = presets.get(name, Document(name=name))
    if given is not None and given.body is not None:
        document = Document(name=name, data=given.body)
    return {
        "name": name,
        "for": about(document),
        "from": _origin_of(runtime, name),
        "default": name == runtime.config.default_policy,
        "mode": str(settings.mode),
        "cascade": [layer.strategy for layer in settings.layers],
    }


def _whole(
    runtime: Runtime, name: str, *, kept: Literal["database", "memory"] | None = None
) -> Json:
    settings = runtime.config.policy(name)
    whole = {
        **_line(runtime, name, preset_documents()),
        "policy": policy_values(settings),
        "warnings": list(policy_warnings(settings)),
    }
    return whole if kept is None else whole | {"kept": kept}


POLICY = "policies/{name}"

ROUTES = (
    ManagementRoute("GET", "keys", keys, PAGED, asker="operator"),
    ManagementRoute("POST", "keys", create_key, statuses=(201,), asker="operator"),
    ManagementRoute("POST", "keys/{key}/rotate", rotate_key, statuses=(201,), asker="operator"),
    ManagementRoute("POST", "keys/{key}/limits", limit_key, asker="operator"),
    ManagementRoute("POST", "keys/{key}/budgets", set_key_budgets, asker="operator"),
    ManagementRoute("POST", "keys/{key}/policy", set_key_policy, asker="operator"),
    ManagementRoute("DELETE", "keys/{key}", revoke_key, asker="operator"),
    ManagementRoute("GET", "policies", policies, PAGED),
    ManagementRoute("GET", POLICY, policy),
    ManagementRoute("PUT", POLICY, put_policy, statuses=(200, 201), asker="operator"),
    ManagementRoute("DELETE", POLICY, delete_policy, asker="operator"),
    ManagementRoute("GET", "windows", windows, PAGED, asker="operator"),
    ManagementRoute("POST", "windows/forget", forget_window, asker="operator"),
    ManagementRoute("GET", "config", config, asker="operator"),
)
