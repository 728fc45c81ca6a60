"""Who is calling, by their key, and what it allows.

A key's secret is never stored: rows and the table in memory hold its HMAC-SHA-256 under the server's own
secret. Keys made by Weir are 256 random bits, so a slow hash would protect nothing that this does not.
"""

import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.access.destination import Caller
from proxy.config.values import KeySettings
from proxy.errors import InvalidAPIKey
from proxy.store.records import KeyRow

PREFIX = "weir-sk-"
_REMEMBERED = 4096
_CREDENTIAL_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})
_MAX_LEN = 1024
_TENANT_DIGITS = 32
_ALL = frozenset({"policy", "mode", "relay"})


def create_secret() -> str:
    """A new key's secret: ``weir-sk-`` and 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(secret: bytes, credential: bytes) -> str:
    """HMAC-SHA-256 of a credential under the server's secret, hex; what a ``KeyRow`` holds."""
    return hmac.digest(secret, credential, "sha256").hex()


def presented(headers: Mapping[str, str]) -> str:
    """The credential of a request: ``Authorization``, else ``x-api-key``, else ``api-key``, else nothing.

    ``Bearer`` is taken off; another scheme stays whole, so that two of its users never look alike. Names are
    expected in lower case, as servers give them.
    """
    authorization = headers.get("authorization", "").strip()
    if authorization:
        scheme, _, token = authorization.partition(" ")
        return token.strip() if scheme.lower() == "bearer" else authorization
    return (headers.get("x-api-key") or headers.get("api-key") or "").strip()


def credentials_in(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that :func:`presented` looks at, decoded."""
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in headers if n in _CREDENTIAL_HEADERS}


def same_secret(given: str, expected: str | None) -> bool:
    """Whether the two are equal, in time that does not depend on where they differ; never for None or ''."""
    return bool(expected) and hmac.compare_digest(given.encode(), (expected or "").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    name: str
    policy: str | None
    models: tuple[str, ...]
    allow: frozenset[str]
    upstream_key: bytes | None


class Keyring:
    """The keys of the file and of the store, as one immutable table; a reload makes a new one."""

    def __init__(
        self,
        config_keys: Iterable[KeySettings],
        store_rows: Iterable[KeyRow],
        *,
        secret: bytes,
        mode: Literal["auto", "open", "keys"],
    ) -> None:
        """``auto`` is open until there was a key: a revoked one keeps the door shut."""
        self._secret = secret
        self._callers: dict[str, Caller] = {}
        self._known: dict[str, _Known] = {}
        self._revoked: set[str] = set()
        self._names: dict[str, str] = {}
        for row in store_rows:
            self._names[row.digest[:_TENANT_DIGITS]] = row.name
            if row.revoked is not None:
                self._revoked.add(row.digest)
                continue
            self._known[row.digest] = _Known(
                name=row.name,
                policy=row.policy,
                models=row.models,
                allow=frozenset(row.allow),
                upstream_key=None,
            )
        for key in config_keys:
            digest = key_digest(secret, key.secret.get_secret_value().encode())
            self._revoked.discard(digest)
            self._names[digest[:_TENANT_DIGITS]] = key.name
            self._known[digest] = _Known(
                name=key.name,
                policy=key.policy,
                models=key.models,
                allow=frozenset(key.allow),
                upstream_key=key.upstream_key.get_secret_value().encode() if key.upstream_key else None,
            )
        self.is_open = mode == "open" or (mode == "auto" and not self._names)

    @property
    def names(self) -> dict[str, str]:
        """The name of every key by its tenant, revoked ones included."""
        return dict(self._names)

    def __len__(self) -> int:
        return len(self._known)

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Who sent these headers (names in lower case); InvalidAPIKey for a missing, unknown or revoked key."""
        credential = presented(headers)
        caller = self._callers.get(credential)
        if caller is None:
            caller = self._identified(credential)
            if len(credential) <= _MAX_LEN:
                if len(self._callers) >= _REMEMBERED:
                    del self._callers[next(iter(self._callers))]
                self._callers[credential] = caller
        return caller

    def _identified(self, credential: str) -> Caller:
        given = credential.encode("utf-8", "surrogateescape")
        # Looked up by HMAC: what the time of a lookup betrays about digests says nothing about keys.
        digest = key_digest(self._secret, given)
        known = self._known.get(digest)
        if known is not None:
            own = b"" if credential.startswith(PREFIX) else given
            return Caller(
                tenant=digest[:_TENANT_DIGITS],
                name=known.name,
                policy=known.policy,
                models=known.models,
                allow=known.allow,
                credential=known.upstream_key if known.upstream_key is not None else own,
            )
        # A key that looks like Weir's own and is not known must not become a stranger with every freedom.
        if not self.is_open or digest in self._revoked or credential.startswith(PREFIX):
            raise InvalidAPIKey(_REFUSALS[bool(credential)])
        return Caller(tenant=digest[:_TENANT_DIGITS], allow=_ALL, credential=given)


_REFUSALS = {
    True: "Incorrect API key provided. Ask the operator of this proxy for a key.",
    False: "You didn't provide an API key. Send it as Authorization: Bearer YOUR_KEY.",
}
