"""Keys: those of the file, and those that the operator makes, replaces and revokes while Weir runs."""

from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType

from proxy.access.admission import LIMITS, create_secret, key_digest, key_limits
from proxy.config.file import nearest
from proxy.config.values import Permission
from proxy.errors import InvalidRequest, NotFound
from proxy.http.request import (
    DAYS,
    DOLLAR_DIGITS,
    Count,
    Dollars,
    ManagementAnswer,
    ManagementRequest,
    Moment,
    Page,
    Shape,
    Tokens,
    as_json,
    page_of_whole,
)
from proxy.store.records import DAY, KeyRow, NameTaken

MAX_KEY_NAME = 100
MAX_MODELS = 100
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)
Most = Annotated[int, Meta(ge=1, description="counted in each process")]


class LimitedKey(Shape):
    """What a key may take and until when; null for what every key may, and for ever."""

    name: str
    concurrency: Most | None
    requests_per_minute: Most | None
    expires: Moment | None


class Key(LimitedKey):
    """One key without its secret, and what its requests took in the last 30 days."""

    tenant: Annotated[str, Meta(description="whose conversations are its own")]
    origin: Literal["file", "database"]
    policy: str | None
    models: list[str]
    allow: list[str]
    created: Moment | None
    revoked: Moment | None
    last_used: Moment | None
    requests: Count
    tokens_after: Tokens
    cost: Dollars | None


Until = Annotated[Moment | str | None, Meta(description="a moment or day of ISO 8601, or like 24h or 30d from now")]


class NewLimits(Shape):
    """Limits to set; null, or none, lifts one."""

    concurrency: Most | UnsetType | None = UNSET
    requests_per_minute: Most | UnsetType | None = UNSET
    expires: Until | UnsetType = UNSET


class NewKey(NewLimits, kw_only=True):
    """A key to make."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_KEY_NAME)]
    policy: str | UnsetType | None = UNSET
    models: list[str] | UnsetType = UNSET
    allow: list[Permission] | UnsetType = UNSET


class MadeKey(LimitedKey):
    """A key that was just made: its secret is told this once and never again."""

    secret: str
    policy: str | None
    models: list[str]
    allow: list[str]


class RevokedKey(Shape):
    """The key that is no longer taken."""

    name: str
    revoked: Moment


async def listing(asked: ManagementRequest) -> Page[Key]:
    """Every key, revoked ones included, with what it may, and its use in the last 30 days; no secrets."""
    wanted, runtime = (asked.limit(), asked.after(str)), asked.runtime
    made = await asked.store.list_keys()
    used = {row.tenant: row for row in await asked.store.usage(None, since=runtime.planner.clock() - DAYS * DAY)}
    stated: dict[str, KeyRow] = {}
    for each in runtime.config.keys:
        digest = key_digest(runtime.secret, each.secret.get_secret_value().encode())
        same = {name: getattr(each, name) for name in ("name", "policy", "models", "allow", *LIMITS)}
        stated[digest] = KeyRow(digest=digest, created=0, **same)

    def shown(row: KeyRow) -> Key:
        tenant = row.tenant or row.digest[:32]
        took = used.get(tenant)
        return Key.of(
            row,
            tenant=tenant,
            origin="file" if row.digest in stated else "database",
            models=list(row.models),
            allow=list(row.allow),
            created=row.created or None,
            last_used=None if took is None else took.last,
            requests=0 if took is None else took.requests,
            tokens_after=0 if took is None else took.tokens_after,
            cost=None if took is None or not took.priced else round(took.cost, DOLLAR_DIGITS),
        )

    rows = [*stated.values(), *(row for row in made if row.digest not in stated)]
    return page_of_whole(rows, wanted, shown, lambda row: (row.name,))


async def create(asked: ManagementRequest) -> ManagementAnswer:
    """Make a key. Its secret is told this once; from the first key on only known keys may call."""
    given = await asked.fields(NewKey.__struct_fields__)
    secret = create_secret()
    row = _row(asked, given, digest=key_digest(asked.runtime.secret, secret.encode()))
    try:
        await asked.store.add_key(row)
    except NameTaken:
        text = f"There is a key {row.name!r} already, or was one: take another name."
        raise InvalidRequest(text, param="name") from None
    asked.runtime.take_keys(await asked.store.list_keys())
    return as_json(_shown(row, secret), status=201)


async def rotate(asked: ManagementRequest) -> ManagementAnswer:
    """Give a key another secret, told this once; what was the old one's, conversations and usage, is the new one's."""
    await asked.fields(())
    old, secret, at = await _in_force(asked), create_secret(), asked.runtime.planner.clock()
    await asked.store.rotate_key(old.name, key_digest(asked.runtime.secret, secret.encode()), at=at, until=at)
    asked.runtime.take_keys(await asked.store.list_keys())
    return as_json(_shown(old, secret), status=201)


async def limit(asked: ManagementRequest) -> LimitedKey:
    """Set some of a key's limits, from its next request on; those that are not given stay."""
    given = await asked.fields(LIMITS)
    old, at = await _in_force(asked), asked.runtime.planner.clock()
    limits = key_limits(given, now=at)
    if limits:
        await asked.store.limit_key(old.name, limits, at)
        asked.runtime.take_keys(await asked.store.list_keys())
    return LimitedKey.of(await _in_force(asked))


async def revoke(asked: ManagementRequest) -> RevokedKey:
    """Revoke a key: its next request is refused. One of the file is taken out of the file instead."""
    old, at = await _in_force(asked), asked.runtime.planner.clock()
    await asked.store.revoke_key(old.name, at)
    asked.runtime.take_keys(await asked.store.list_keys())
    return RevokedKey(name=old.name, revoked=at)


async def _in_force(asked: ManagementRequest) -> KeyRow:
    name, rows = asked.path["key"], await asked.store.list_keys()
    for row in rows:
        if row.name == name and row.revoked is None:
            return row
    if any(each.name == name for each in asked.runtime.config.keys):
        raise InvalidRequest(f"The key {name[:80]!r} stands in the configuration's file: change it there.", param="key")
    known = sorted(row.name for row in rows if row.revoked is None)
    raise NotFound(f"There is no key {name[:80]!r}{nearest(name, known)}.")


def _shown(row: KeyRow, secret: str) -> MadeKey:
    return MadeKey.of(row, secret=secret, models=list(row.models), allow=list(row.allow))


def _row(asked: ManagementRequest, given: dict[str, Any], *, digest: str) -> KeyRow:
    name, policy = given.get("name"), given.get("policy")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_KEY_NAME or not name.isprintable():
        raise InvalidRequest(f"name must be 1 to {MAX_KEY_NAME} characters.", param="name")
    if policy is not None and policy not in asked.runtime.config.policies:
        known = list(asked.runtime.config.policies)
        hint = nearest(policy, known) if isinstance(policy, str) else ""
        raise InvalidRequest(f"There is no policy {str(policy)[:80]!r}{hint}.", param="policy")
    models, allow = _words(given, "models"), _words(given, "allow")
    for word in allow:
        if word not in PERMISSIONS:
            raise InvalidRequest(f"allow may have {', '.join(PERMISSIONS)}.", param="allow")
    now = asked.runtime.planner.clock()
    limits: dict[str, Any] = key_limits(given, now=now)
    return KeyRow(name=name.strip(), digest=digest, policy=policy, models=models, allow=allow, created=now, **limits)


def _words(given: dict[str, Any], name: str) -> tuple[str, ...]:
    found = given.get(name, [])
    is_list = isinstance(found, list) and len(found) <= MAX_MODELS
    if not is_list or not all(isinstance(each, str) and each.strip() for each in found):
        raise InvalidRequest(f"{name} must be a list of words.", param=name)
    return tuple(dict.fromkeys(each.strip() for each in found))
