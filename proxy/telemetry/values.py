"""What an attribute may hold: bounded, without credentials, and low in cardinality where it has to be."""

import re
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from proxy.redaction import redact
from proxy.telemetry import names

Value = str | int | float | bool | tuple[str, ...]

LONGEST_VALUE: Final = 256
LONGEST_SESSION: Final = 200
LONGEST_LIST: Final = 8
_CODE: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")


@lru_cache(maxsize=1024)
def clean(text: str) -> str:
    """``text`` as an attribute value: at most 256 characters, without what looks like a credential."""
    return redact(text[: 2 * LONGEST_VALUE])[:LONGEST_VALUE]


@lru_cache(maxsize=1024)
def code(text: str) -> str:
    """``text`` if it is a low-cardinality code, else ``_OTHER`` (the fallback of the conventions)."""
    return text if _CODE.fullmatch(text) and redact(text) == text else "_OTHER"


def session_id(conversation: str) -> str:
    """The conversation as ``session.id``, hashed where viewers would drop it: not ASCII, or over 200 characters."""
    if len(conversation) <= LONGEST_SESSION and conversation.isascii() and conversation.isprintable():
        return clean(conversation)
    return blake2b(conversation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@lru_cache(maxsize=256)
def provider_name(configured: str, *, host: str = "", provider: str | None = None) -> str:
    """``gen_ai.provider.name`` of an upstream: the conventions' where its host or provider is known, else its own."""
    if provider:
        return names.PROVIDERS.get(provider, provider)
    known = (name for end, name in names.PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return next(known, configured)
