"""API keys, stored by the HMAC of their secret, and the secret that keys this HMAC."""

import json
import secrets

import sqlalchemy as sa

from proxy.store.audit import append
from proxy.store.audit_events import of_key
from proxy.store.errors import NameTaken
from proxy.store.records import KeyRow
from proxy.store.tables import keep_first, keys, meta

SECRET_BYTES = 32
ADD_KEY = keep_first(keys)
MAKE_SECRET = keep_first(meta)


def secret(connection: sa.Connection) -> bytes:
    """The store's own secret, 32 bytes, made on first use."""
    connection.execute(
        MAKE_SECRET[connection.dialect.name],
        {"name": "secret", "body": secrets.token_bytes(SECRET_BYTES)},
    )
    return bytes(connection.execute(sa.select(meta.c.body).where(meta.c.name == "secret")).scalar_one())


def keep_secret(connection: sa.Connection, value: bytes) -> None:
    """Have a database that was made anew go on with the secret that its Weir hashes with."""
    connection.execute(MAKE_SECRET[connection.dialect.name], {"name": "secret", "body": value})


def stored_secret(connection: sa.Connection) -> bytes | None:
    """The store's own secret if it was made already."""
    return connection.scalar(sa.select(meta.c.body).where(meta.c.name == "secret"))


def add_key(connection: sa.Connection, key: KeyRow) -> None:
    """Store ``key``; :class:`NameTaken` if its name or its secret is in use."""
    made = connection.execute(
        ADD_KEY[connection.dialect.name],
        {
            "name": key.name,
            "digest": key.digest,
            "policy": key.policy,
            "models": json.dumps(key.models),
            "allow": json.dumps(key.allow),
            "created": key.created,
            "revoked": key.revoked,
        },
    )
    if made.rowcount != 1:
        raise NameTaken(f"a key named {key.name!r}, or with the same secret, exists already", reason="name")
    append(connection, [of_key(key, at=key.created)])


def list_keys(connection: sa.Connection) -> list[KeyRow]:
    """Every key, revoked ones included, oldest first."""
    rows = connection.execute(sa.select(keys).order_by(keys.c.created, keys.c.name))
    return [
        KeyRow(
            name=row.name,
            digest=row.digest,
            policy=row.policy,
            models=tuple(json.loads(row.models)),
            allow=tuple(json.loads(row.allow)),
            created=row.created,
            revoked=row.revoked,
        )
        for row in rows
    ]


def revoke_key(connection: sa.Connection, name: str, at: float) -> bool:
    """Whether there was such a key in force; it is revoked now."""
    found = connection.execute(sa.update(keys).where(keys.c.name == name, keys.c.revoked.is_(None)).values(revoked=at))
    if found.rowcount == 1:
        append(connection, [of_key(name, at=at)])
    return found.rowcount == 1
