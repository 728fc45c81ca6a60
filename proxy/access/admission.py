"""Who is calling, what their key allows, and who is let in.

Rows and the table in memory hold the HMAC-SHA-256 of a key under the server's own secret. Keys made
by Weir are 256 random bits, so a slow hash would protect nothing that this does not.

A key is sent in a header that no browser adds by itself. Where none is needed, a page that somebody
has open may send a simple POST across origins without the person's knowledge, or have its own name
lead to 127.0.0.1 (DNS rebinding) and be of the same origin then. The first says so in ``Origin`` or
``Sec-Fetch-Site``, the other in ``Host``.
"""

import asyncio
import hmac
import logging
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from cachetools import LRUCache
from pydantic import TypeAdapter, ValidationError

from proxy.access.destination import Caller, Headers
from proxy.access.shared_limits import SharedLimits
from proxy.config.budgets import Budget, TeamSettings, budget_in
from proxy.config.values import (
    AuthSettings,
    Config,
    Count,
    Expiry,
    KeySettings,
    LimitSettings,
    Listen,
    Seconds,
)
from proxy.errors import (
    Busy,
    ExpiredAPIKey,
    Forbidden,
    InvalidAPIKey,
    InvalidRequest,
    ModelNotAllowed,
    ProxyError,
    RateLimited,
)
from proxy.store import Store
from proxy.store.records import KeyRow, Refusal

log = logging.getLogger("weir")

PREFIX = "weir-sk-"
Scope = MutableMapping[str, Any]
_REMEMBERED = 4096
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
_MAX_LEN = 1024
_TENANT_DIGITS = 32
_IN_COMMON = b"\0in common"
"""What the common tenant, and a header's, are derived from: no header holds a zero byte, so it is
nobody's key.
"""
_BY_HEADER = b"\0by header"
_ALL = frozenset({"policy", "mode", "relay"})
KINDS: Mapping[str, TypeAdapter[Any]] = {
    "concurrency": TypeAdapter(Count),
    "requests_per_minute": TypeAdapter(Count),
    "tokens_per_minute": TypeAdapter(Count),
    "expires": TypeAdapter(Expiry),
}
LIMITS = tuple(KINDS)
SAID = {
    **dict.fromkeys(LIMITS, "a whole number from 1 on"),
    "expires": "like 24h, 30d, 2027-01-31 or 2027-01-31T18:00Z",
}
AHEAD = re.compile(r"\d+\s*[mhd]")
SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)


def create_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(secret: bytes, credential: bytes) -> str:
    return hmac.digest(secret, credential, "sha256").hex()


def presented(headers: Mapping[str, str]) -> str:
    """``Authorization``, else ``x-api-key``, else ``api-key``, else nothing; names in lower case.

    ``Bearer`` is taken off; another scheme stays whole, so that two of its users never look alike.
    """
    authorization = headers.get("authorization", "").strip()
    if authorization:
        scheme, _, token = authorization.partition(" ")
        return token.strip() if scheme.lower() == "bearer" else authorization
    return (headers.get("x-api-key") or headers.get("api-key") or "").strip()


def credentials_in(headers: Headers) -> dict[str, str]:
    return _decoded(headers, CREDENTIALS)


def _decoded(headers: Headers, wanted: frozenset[bytes]) -> dict[str, str]:
    sent = dict(headers)
    return {name.decode("latin-1"): sent[name].decode("latin-1") for name in wanted & sent.keys()}


def same_secret(given: str, expected: str | None) -> bool:
    """In time that does not depend on where they differ; never for None or an empty one."""
    return bool(expected) and hmac.compare_digest(given.encode(), (expected or "").encode())


def key_limits(given: Mapping[str, object], *, now: float) -> dict[str, float | None]:
    """The limits among what was given; ``none`` or None lifts one. Raises InvalidRequest."""
    found: dict[str, float | None] = {}
    for name in LIMITS:
        value = given.get(name, "")
        if value in (None, "none"):
            found[name] = None
        elif value != "":
            ago = isinstance(value, str) and AHEAD.fullmatch(value.strip())
            try:
                found[name] = (
                    now + SECONDS.validate_python(value)
                    if ago
                    else KINDS[name].validate_python(value)
                )
            except ValidationError:
                raise InvalidRequest(
                    f"{name} should be {SAID[name]}, or none.", param=name
                ) from None
    if (expires := found.get("expires")) is not None and expires <= now:
        raise InvalidRequest(
            "expires lies in the past: revoke a key that is to end now.", param="expires"
        )
    return found


def limits_said(key: KeyRow) -> str:
    each = [
        (key.requests_per_minute, "a minute"),
        (key.tokens_per_minute, "tokens a minute"),
        (key.concurrency, "at once"),
    ]
    return ", ".join(f"{most:,} {said}" for most, said in each if most is not None)


class Keyring:
    def __init__(
        self,
        config_keys: Iterable[KeySettings],
        store_rows: Iterable[KeyRow],
        *,
        secret: bytes,
        mode: Literal["auto", "open", "keys"],
        tenant: str = "key",
        teams: Mapping[str, TeamSettings] = {},
    ) -> None:
        """``auto`` is open until a key exists: a revoked one keeps it closed.

        ``tenant`` is one of ``auth.tenant``, or ``strangers``: those without a known key have
        theirs in common.
        """
        self._secret = secret
        self._tenant = tenant
        self._teams = teams
        self._common = key_digest(secret, _IN_COMMON)[:_TENANT_DIGITS]
        self.header = tenant.partition(":")[2].lower().encode()
        self._remembered = lru_cache(_REMEMBERED)(self._identified)
        self._known: dict[str, Caller] = {}
        self._revoked: set[str] = set()
        self.names: dict[str, str] = {}
        self.without_team: set[tuple[str, str]] = set()
        rows = [(row, row.tenant or row.digest[:_TENANT_DIGITS]) for row in store_rows]
        newest = {tenant: row for row, tenant in rows if row.revoked is None}
        for row, tenant in rows:
            self.names[tenant] = row.name
            if row.revoked is not None and row.revoked <= time.time():
                self._revoked.add(row.digest)
                continue
            # a secret that was rotated out is the same key until it ends, whatever is set meanwhile
            self._known[row.digest] = self._caller_of(newest.get(tenant, row), row.digest, tenant)
        for key in config_keys:
            digest = key_digest(secret, key.secret.get_secret_value().encode())
            tenant = digest[:_TENANT_DIGITS]
            credential = key.upstream_key.get_secret_value().encode() if key.upstream_key else b""
            self._revoked.discard(digest)
            self.names[tenant] = key.name
            self._known[digest] = self._caller_of(key, digest, tenant, credential)
        self.is_open = mode == "open" or (mode == "auto" and not self.names)

    def __len__(self) -> int:
        return len(self._known)

    def identify(self, headers: Mapping[str, str], *, said: bytes = b"") -> Caller:
        """The caller, in the tenant that the configured header has ``said``, if it has.

        A known key only separates its own conversations by that: no header gives access to another
        key's. Raises InvalidAPIKey for a missing, unknown or revoked key, ExpiredAPIKey for one
        that was valid until now.
        """
        credential = presented(headers)
        caller = (self._remembered if len(credential) <= _MAX_LEN else self._identified)(credential)
        if _is_over(caller):
            at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(caller.expires))
            raise ExpiredAPIKey(
                f"This API key expired at {at}. Ask the operator of this proxy for another."
            )
        if not said:
            return caller
        within = caller.tenant.encode() if caller.name is not None else b""
        return replace(
            caller,
            tenant=key_digest(self._secret, b"\0".join((_BY_HEADER, within, said)))[
                :_TENANT_DIGITS
            ],
        )

    @property
    def callers(self) -> Iterable[Caller]:
        """Every valid key, once, however many secrets it has."""
        return {each.account: each for each in self._known.values()}.values()

    def again(self, key: str) -> Caller | None:
        known = self._known.get(key)
        if known is not None:
            return None if _is_over(known) else known
        return self._stranger(key) if self.is_open and key not in self._revoked else None

    def _identified(self, credential: str) -> Caller:
        given = credential.encode("utf-8", "surrogateescape")
        # Looked up by HMAC: what the time of a lookup reveals about digests says nothing about
        # keys.
        digest = key_digest(self._secret, given)
        known = self._known.get(digest)
        if known is not None:
            goes_up = not known.credential and not credential.startswith(PREFIX)
            return replace(known, credential=given) if goes_up else known
        # An unknown key that looks like Weir's own must not count as an unrestricted stranger.
        if not self.is_open or digest in self._revoked or credential.startswith(PREFIX):
            raise InvalidAPIKey(_REFUSALS[bool(credential)])
        return self._stranger(digest, given)

    def _stranger(self, digest: str, credential: bytes = b"") -> Caller:
        is_common = self._tenant in ("single", "strangers")
        tenant = self._common if is_common else digest[:_TENANT_DIGITS]
        return Caller(tenant=tenant, key=digest, allow=_ALL, credential=credential)

    def _caller_of(
        self, key: KeyRow | KeySettings, digest: str, tenant: str, credential: bytes = b""
    ) -> Caller:
        team = self._teams.get(key.team or "")
        if key.team and team is None:
            self.without_team.add((key.name, key.team))
        budgets = _budgets_of(key)
        counted = (
            budgets,
            key.tokens_per_minute,
            team and (team.budgets or team.tokens_per_minute),
        )
        return Caller(
            tenant=self._common if self._tenant == "single" else tenant,
            key=digest,
            name=key.name,
            policy=key.policy,
            models=key.models,
            allow=frozenset(key.allow),
            credential=credential,
            account=tenant,
            team=key.team or "",
            team_rules=team,
            budgets=budgets,
            is_counted=any(counted),
            **{name: getattr(key, name) for name in LIMITS},
        )


def _budgets_of(key: KeyRow | KeySettings) -> tuple[Budget, ...]:
    if isinstance(key, KeySettings):
        return key.budgets
    found = []
    for text in key.budgets or ():
        try:
            found.append(budget_in(text))
        except ValueError as fault:  # as another version of Weir may have stored it
            log.error("a budget of the key %s does not hold: it %s", key.name, fault)
    return tuple(found)


def tenant_source(auth: AuthSettings, listen: Listen) -> str:
    """How a key ring separates tenants: what ``auth.tenant`` says, else by key, beyond loopback
    without exception.
    """
    return auth.tenant or ("strangers" if listen.loopback else "key")


def _is_over(caller: Caller) -> bool:
    return caller.expires is not None and caller.expires <= time.time()


_REFUSALS = {
    True: "Incorrect API key provided. Ask the operator of this proxy for a key.",
    False: "You didn't provide an API key. Send it as Authorization: Bearer YOUR_KEY.",
}


PATIENCE = 5.0  # seconds that a body waits for others to go


class Admission:
    def __init__(
        self, limits: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._minutes: dict[str, _Minute] = {}
        self._all = limits.concurrency
        self._most = limits.concurrency_per_key or max(1, limits.concurrency // 2)
        self._bytes = limits.bytes_in_flight
        self._bytes_of_one = limits.bytes_in_flight_per_key or max(1, limits.bytes_in_flight // 2)
        self._usage: dict[str, _Usage] = {}
        self.held = self.passed = self._requests = 0
        self._waiting: deque[tuple[Slot, int, asyncio.Future[None]]] = deque()
        self.shared: SharedLimits | None = None

    def share(self, store: Store) -> None:
        """Enforce the limits of keys across all processes that share a store."""
        self.shared = SharedLimits(store, self.open_of)

    def open_of(self, key: str) -> int:
        """How many requests of a key are open here."""
        usage = self._usage.get(key)
        return 0 if usage is None else usage.requests

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, caller: Caller) -> "Slot":
        if self._requests >= self._all:
            raise Busy(
                "Weir has as many requests open as it may have (limits.concurrency). Please try"
                " again."
            )
        key = caller.name or caller.tenant
        team = caller.team_rules
        usage = self._usage.get(key) or _Usage()
        if usage.requests >= (caller.concurrency or self._most):
            said = "its concurrency" if caller.concurrency else "limits.concurrency_per_key"
            text = f"This key has {usage.requests} requests open, as many as it may have ({said})."
            raise RateLimited(f"{text} Please try again.")
        began: Sequence[tuple[str, float]] = ()
        if caller.requests_per_minute is not None or team is not None:
            began = self._begin(_requests(caller))
        self._usage[key] = usage
        usage.requests += 1
        self._requests += 1
        return Slot(self, key, usage, began=began)

    async def share_limits(self, slot: "Slot", caller: Caller) -> None:
        """Nothing, or RateLimited where all processes together have as many of the key's requests,
        or of its team's, as they may have.
        """
        rate = caller.requests_per_minute
        most = caller.concurrency
        if self.shared is None:
            return
        refused = None
        if rate is not None or most is not None:
            refused = await self.shared.enter(slot.key, rate=rate, most=most)
        if refused is not None:
            self.forget(slot)
            if refused.refused is Refusal.RATE:
                raise _too_much(_Rate(slot.key, "This key", "requests", rate or 0), refused.seconds)
            text = (
                f"This key has {most} requests open in all processes, as many as it may have (its"
                " concurrency)."
            )
            raise RateLimited(f"{text} Please try again.")
        for each in _requests(caller):
            if each.name != slot.key:
                await self._share(slot, each)

    async def take_tokens(self, slot: "Slot", caller: Caller, tokens: int) -> None:
        """Count what a request may take in this minute, where its key or team has a rate of it.

        Raises RateLimited where they have used that up.
        """
        rates = _tokens(caller)
        self._begin(rates, tokens)
        for each in rates if self.shared is not None else ():
            await self._share(slot, each, tokens)

    async def _share(self, slot: "Slot", rate: "_Rate", count: int = 1) -> None:
        """Nothing, or RateLimited where all processes together have used up a rate."""
        if self.shared is None:
            return
        refused = await self.shared.enter(rate.name, rate=rate.most, most=None, count=count)
        if refused is not None:
            self.forget(slot)
            raise _too_much(rate, refused.seconds)

    def _begin(self, rates: Sequence["_Rate"], count: int = 1) -> list[tuple[str, float]]:
        """Count something in the minute of each rate. Raises RateLimited, and then counts it in
        none.
        """
        now = self._clock()
        for rate in rates:
            minute = self._minutes.setdefault(rate.name, _Minute())
            if (seconds := minute.wait(rate.most, now)) is not None:
                raise _too_much(rate, seconds)
        for rate in rates:
            self._minutes[rate.name].add(now, count)
        return [(rate.name, now) for rate in rates]

    def forget(self, slot: "Slot") -> None:
        """Remove a request that was not allowed from its minute's count."""
        for name, at in slot.began:
            self._minutes[name].remove(at)
        slot.began = ()

    def leave(self, slot: "Slot") -> None:
        slot.usage.requests -= 1
        self._requests -= 1
        slot.usage.held -= slot.held
        self.held -= slot.held
        slot.held = 0
        if not slot.usage.requests:
            self._usage.pop(slot.key, None)
        if self.shared is not None:
            self.shared.left(slot.key)
        for other, size, turn in tuple(self._waiting):
            if not turn.done() and self.take(other, size):
                turn.set_result(None)

    def take(self, slot: "Slot", size: int) -> bool:
        """A single request always has room; it has limits of its own."""
        usage = slot.usage
        if usage.held + size > self._bytes_of_one and usage.held > slot.held:
            return False
        if self.held + size > self._bytes and self.held > slot.held:
            return False
        slot.held += size
        usage.held += size
        self.held += size
        self.passed += size
        return True

    async def wait(self, slot: "Slot", size: int) -> None:
        waiting = (slot, size, asyncio.get_running_loop().create_future())
        begun = self._clock()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(PATIENCE):
                await waiting[2]
        except TimeoutError:
            if slot.usage.held + size > self._bytes_of_one:
                text = (
                    f"The requests of this key that are being answered hold {slot.usage.held}"
                    " bytes, and this one "
                )
                text += (
                    f"has {size} more (limits.bytes_in_flight_per_key is {self._bytes_of_one})."
                    " Please try again."
                )
                raise RateLimited(text, retry_after=math.ceil(PATIENCE)) from None
            raise Busy.after(PATIENCE) from None
        finally:
            slot.waited += self._clock() - begun
            self._waiting.remove(waiting)


class _Rate(NamedTuple):
    """How many of a ``unit`` may come in a minute, and ``whose`` they are.

    ``name`` is never shown.
    """

    name: str
    whose: str
    unit: Literal["requests", "tokens"]
    most: int


def _rates(
    caller: Caller, unit: Literal["requests", "tokens"], own: int | None, team: int | None
) -> list[_Rate]:
    name = caller.name or caller.tenant
    found = []
    if own is not None:
        key = name if unit == "requests" else f"\1{unit}\1{name}"
        found.append(_Rate(key, "This key", unit, own))
    if team is not None:
        whose = f"The team {caller.team}"
        found.append(_Rate(f"\1{unit} of team\1{caller.team}", whose, unit, team))
    return found


def _requests(caller: Caller) -> list[_Rate]:
    team = caller.team_rules
    most = None if team is None else team.requests_per_minute
    return _rates(caller, "requests", caller.requests_per_minute, most)


def _tokens(caller: Caller) -> list[_Rate]:
    team = caller.team_rules
    most = None if team is None else team.tokens_per_minute
    return _rates(caller, "tokens", caller.tokens_per_minute, most)


def _too_much(rate: _Rate, seconds: int) -> RateLimited:
    done = "begun" if rate.unit == "requests" else "taken"
    text = (
        f"{rate.whose} has {done} {rate.most} {rate.unit} within a minute, as many as it may (its"
        f" {rate.unit}_per_minute)."
    )
    return RateLimited(f"{text} Please try again.", retry_after=seconds)


@dataclass(slots=True)
class _Minute:
    """Amounts received within a minute, with their times."""

    came: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def wait(self, most: int, now: float) -> int | None:
        """The seconds until there is less than ``most``, None where there is."""
        while self.came and now - self.came[0][0] >= MINUTE:
            self.total -= self.came.popleft()[1]
        left = self.total
        for at, count in self.came if left >= most else ():
            left -= count
            if left < most:
                return math.ceil(MINUTE - (now - at))
        return None

    def add(self, at: float, count: int) -> None:
        self.came.append((at, count))
        self.total += count

    def remove(self, at: float) -> None:
        """Remove the amount of a moment, if it is still there."""
        found = next((each for each in self.came if each[0] == at), None)
        if found is not None:
            self.came.remove(found)
            self.total -= found[1]


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    held: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    admission: Admission
    key: str
    usage: _Usage
    held: int = 0
    waited: float = 0.0
    began: Sequence[tuple[str, float]] = ()

    async def hold(self, size: int) -> None:
        """Waits a moment for room; raises RateLimited, or Busy for all keys' bytes."""
        if not self.admission.take(self, size):
            await self.admission.wait(self, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (Forbidden, ModelNotAllowed)):
            shared = self.admission.shared
            names = [name for name, _at in self.began]
            self.admission.forget(self)
            if shared is not None:
                for name in names:
                    shared.forget(name)
        self.admission.leave(self)


MAX_WRONG = 10
MINUTE = 60.0
FORGET = 600.0
MIN_SECONDS = 2.0
MAX_SECONDS = 300.0
MAX_ADDRESSES = 4_096
SITE = 64  # bits of an IPv6 address: the rest of the address is one customer's
REASONS = (("missing",), ("unknown",), ("held_off",))


@dataclass(slots=True)
class _Guesser:
    since: float
    last: float
    wrong: int = 0
    seconds: float = 0.0
    until: float = 0.0


@dataclass(slots=True)
class AuthThrottle:
    """Wrong keys by address. Only a wrong key is ever refused: others may share the address."""

    clock: Callable[[], float] = time.monotonic
    counted: dict[tuple[str, ...], float] = field(
        default_factory=lambda: dict.fromkeys(REASONS, 0.0)
    )
    _guessers: LRUCache[str, _Guesser] = field(default_factory=lambda: LRUCache(MAX_ADDRESSES))

    def answer(self, scope: Scope, error: ProxyError, *, guessed: bool = True) -> ProxyError:
        if not guessed:
            self.counted["missing",] += 1
            return error
        held_off = self._held_off(_site((scope.get("client") or ("",))[0]))
        if not held_off:
            self.counted["unknown",] += 1
            return error
        self.counted["held_off",] += 1
        text = (
            "Too many wrong API keys came from this address, and this one is wrong too. Try again"
            f" in {held_off} s."
        )
        return RateLimited(text, retry_after=held_off)

    def _held_off(self, site: str) -> int:
        """Seconds to wait, twice as long each time; 0 for the first few."""
        now = self.clock()
        guesser = self._guessers.get(site)
        if guesser is None or now - guesser.last > FORGET:
            guesser = self._guessers[site] = _Guesser(since=now, last=now)
        guesser.last = now
        if now >= guesser.until:
            if not guesser.seconds and now - guesser.since > MINUTE:
                guesser.since = now
                guesser.wrong = 0
            guesser.wrong += 1
            if guesser.wrong <= MAX_WRONG:
                return 0
            guesser.seconds = min(MAX_SECONDS, max(MIN_SECONDS, 2 * guesser.seconds))
            guesser.until = now + guesser.seconds
        return math.ceil(guesser.until - now)


def _site(address: str) -> str:
    parsed = _address(address)
    if not isinstance(parsed, IPv6Address):
        return address
    # A socket that listens on :: has IPv4 clients too.
    return str(parsed.ipv4_mapped) if parsed.ipv4_mapped else str(int(parsed) >> (128 - SITE))


OF_OTHERS = frozenset({"cross-site", "same-site"})
LOOKED_AT = frozenset({b"host", b"origin", b"sec-fetch-site"})
# Besides localhost the names that containers use for their host: public name servers know no
# .internal.
LOCAL = re.compile(r"(.+\.)?localhost\.?|host\.(docker|containers)\.internal", re.IGNORECASE)
GRANTS = b"access-control-"
ASK_FOR_A_KEY = "The operator of this proxy makes one with `weir keys create`."


def admitted(scope: Scope, keyring: Keyring, auth_throttle: AuthThrottle, config: Config) -> Caller:
    """Who sends a request, as :func:`identify` has it. Forbidden for a web page whose requests the
    operator would pay for.
    """
    caller = identify(scope, keyring, auth_throttle)
    if has_own_key(scope, caller, config):
        return caller
    headers = _decoded(scope["headers"], LOOKED_AT)
    if _is_of_another_page(headers, config):
        raise Forbidden(
            f"Web pages of other origins need a key that is known here. {ASK_FOR_A_KEY}"
        )
    if _is_bound_anew(scope, headers, config):
        where = "Ask Weir at http://127.0.0.1 or http://localhost."
        raise Forbidden(f"This name needs a key that is known here. {where} {ASK_FOR_A_KEY}")
    return caller


def identify(scope: Scope, keyring: Keyring, auth_throttle: AuthThrottle) -> Caller:
    """Who sends a request. Raises InvalidAPIKey, RateLimited for one wrong key too many from an
    address.
    """
    headers = credentials_in(scope["headers"])
    try:
        said = dict(scope["headers"]).get(keyring.header, b"").strip() if keyring.header else b""
        return keyring.identify(headers, said=said)
    except ExpiredAPIKey:
        raise
    except InvalidAPIKey as error:
        raise auth_throttle.answer(scope, error, guessed=bool(presented(headers))) from None


def refuse_foreign_pages(
    scope: Scope, config: Config, *, has_key: bool, followed: bool = False
) -> None:
    """Forbidden for a page of another origin, unless a link was ``followed``, and for a rebound
    host name.
    """
    headers = _decoded(scope["headers"], LOOKED_AT)
    if not followed and _is_of_another_page(headers, config):
        raise Forbidden(
            "Web pages of other origins may not use this API. If this is a page of Weir's own"
            " behind a reverse proxy, its address has to be public_url in Weir's configuration."
        )
    if not has_key and _is_bound_anew(scope, headers, config):
        where = (
            "Weir listens on loopback only: ask it at http://127.0.0.1 or http://localhost, or send"
            " a key."
        )
        raise Forbidden(f"This name may not be used without a key. {where}")


def has_own_key(scope: Scope, caller: Caller | None, config: Config) -> bool:
    """Whether nothing is done with a credential of the operator's, or with none at all.

    A preflight has no key, so it is believed that the request after it will have the one that it
    announces.
    """
    if caller is not None and caller.name is not None:
        return True
    if not all(upstream.passes_key for upstream in config.upstreams.values()):
        return False
    return (caller is not None and bool(caller.credential)) or _announces_a_key(scope)


def without_grants(
    answered: Headers, scope: Scope, caller: Caller | None, config: Config
) -> Headers:
    if GRANTS not in b" ".join(dict(answered)) or has_own_key(scope, caller, config):
        return answered
    return [header for header in answered if not header[0].startswith(GRANTS)]


def _announces_a_key(scope: Scope) -> bool:
    if scope["method"] != "OPTIONS":
        return False
    asked = (v.lower() for n, v in scope["headers"] if n == b"access-control-request-headers")
    return any(name.strip() in CREDENTIALS for value in asked for name in value.split(b","))


def _is_of_another_page(headers: Mapping[str, str], config: Config) -> bool:
    origin = headers.get("origin")
    if headers.get("sec-fetch-site") in OF_OTHERS:
        return True
    if origin is not None and origin.lower() == config.public_origin:
        return False
    try:
        return (
            origin is not None
            and not urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        )
    except ValueError:
        return True


def _is_bound_anew(scope: Scope, headers: Mapping[str, str], config: Config) -> bool:
    server = _address((scope.get("server") or ("",))[0])
    host = headers.get("host", "")
    if server is None or not server.is_loopback or _is_local_name(host):
        return False
    return config.public_origin is None or host.lower() != urlsplit(config.public_origin).netloc


def _is_local_name(host: str) -> bool:
    """An address, which no name server can bind to another, or a name of this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return LOCAL.fullmatch(name) is not None or _address(name) is not None


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
