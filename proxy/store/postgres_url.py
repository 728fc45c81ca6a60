"""A PostgreSQL URL as libpq has it and providers print it, in the words of the driver.

Parameters: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS. The driver takes whatever it
does not know for a setting of the server, which then refuses the connection; so every parameter is looked at here.
"""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from proxy.store.errors import StoreError

SCHEMES = frozenset({"postgres", "postgresql", "postgresql+asyncpg"})
DRIVER = frozenset(
    [
        "host",
        "port",
        "dbname",
        "database",
        "user",
        "password",
        "passfile",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
        "sslcrl",
        "sslpassword",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "sslnegotiation",
        "target_session_attrs",
        "krbsrvname",
        "gsslib",
        "service",
    ]
)
SERVER = frozenset({"application_name", "options"})
TUNING = frozenset(
    [
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
        "tcp_user_timeout",
        "gssencmode",
        "sslsni",
        "sslcompression",
        "client_encoding",
        "fallback_application_name",
    ]
)
"""What only tunes a connection, or is so anyway: taken and left aside."""
OURS = frozenset({"connect_timeout", "channel_binding", "ssl"})
MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SERVERS = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")
FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
SWITCH = {"true": "require", "on": "require", "1": "require", "false": "disable", "off": "disable", "0": "disable"}
NOT_BOUND = (
    "channel_binding=require: the driver asyncpg cannot bind the channel; the connection is encrypted all the same, "
    "and sslmode=verify-full makes sure of the server"
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how it is spoken to; ``connect_timeout`` in seconds, None where the URL has none."""

    dsn: str = field(repr=False)
    settings: dict[str, str]
    connect_timeout: float | None = None
    context: ssl.SSLContext | None = None
    notices: tuple[str, ...] = ()


def address_of(url: str) -> Address:
    """What ``url`` says. Raises StoreError for what is no such URL, naming a parameter that is not understood."""
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    unknown = sorted(given.keys() - DRIVER - SERVER - TUNING - OURS)
    if unknown:
        raise StoreError(f"the store's URL has a parameter that Weir does not know: {unknown[0]}", reason="url")
    _check(given)
    mode, notices = _mode(given), tuple[str, ...]()
    if given.get("channel_binding") == "require":
        notices = (NOT_BOUND,)
        mode = mode if mode in MODES[3:] else "require"
    context = _system_context(given, mode)
    driver = {name: value for name, value in given.items() if name in DRIVER and name != "sslmode"}
    if context is not None:
        driver.pop("sslrootcert", None)
    elif mode is not None:
        driver["sslmode"] = mode
    return Address(
        dsn=parts._replace(
            scheme="postgresql", path=parts.path if parts.path != "/" else "", query=urlencode(driver), fragment=""
        ).geturl(),
        settings={"application_name": "weir"} | {name: given[name] for name in given if name in SERVER},
        connect_timeout=_seconds(given.get("connect_timeout")),
        context=context,
        notices=notices,
    )


def _check(given: dict[str, str]) -> None:
    """Say what the driver would say later and less clearly."""
    wanted = given.get("target_session_attrs", "any")
    if wanted not in SERVERS:
        said = f"target_session_attrs in the store's URL is one of {', '.join(SERVERS)}, not {wanted}"
        raise StoreError(said, reason="url")
    for name in FILES:
        if given.get(name) not in {None, "system"} and not Path(given[name]).is_file():
            raise StoreError(f"{name} in the store's URL names a file that is not there: {given[name]}", reason="url")


def _mode(given: dict[str, str]) -> str | None:
    """``sslmode``, or what the shorter ``ssl`` means; None where neither is there."""
    mode = given.get("sslmode")
    if mode is None and "ssl" in given:
        mode = SWITCH.get(given["ssl"].lower(), given["ssl"])
    if mode is not None and mode not in MODES:
        raise StoreError(f"sslmode in the store's URL is one of {', '.join(MODES)}, not {mode}", reason="url")
    return mode


def _system_context(given: dict[str, str], mode: str | None) -> ssl.SSLContext | None:
    """Trust in what the system trusts, where the server is to be verified and no certificate is named for that."""
    named = given.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
    if mode not in {"verify-ca", "verify-full"} or "sslcert" in given or named not in {None, "system"}:
        return None
    if named is None and (Path.home() / ".postgresql" / "root.crt").exists():
        return None
    context = ssl.create_default_context()
    context.check_hostname = mode == "verify-full"
    return context


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return float(text) or None
    except ValueError:
        raise StoreError("connect_timeout in the store's URL is a number of seconds", reason="url") from None
