"""What a web page that somebody has open may not do with the management API behind the person's back.

A key is sent in a header that no browser adds by itself, and no answer carries a CORS header, so a page of another
origin reads nothing and cannot send a key. What is left is Weir on loopback in mode ``open``, where no key is needed:
a page may send a simple POST across origins, or have its own name lead to 127.0.0.1 (DNS rebinding) and be of the same
origin then. The first says so in ``Origin`` or ``Sec-Fetch-Site``, the second in ``Host``.
"""

import re
from collections.abc import Mapping, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from proxy.errors import Forbidden

OF_OTHERS = frozenset({"cross-site", "same-site"})
LOOKED_AT = frozenset({b"host", b"origin", b"sec-fetch-site"})
LOCAL = re.compile(r"(.+\.)?localhost\.?", re.IGNORECASE)


def refuse_foreign_pages(scope: MutableMapping[str, Any], *, has_key: bool) -> None:
    """Nothing, or Forbidden for a request that a page of another origin has made, or one whose name was bound anew."""
    headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"] if n in LOOKED_AT}
    if headers.get("sec-fetch-site") in OF_OTHERS or not _is_of_this_origin(headers):
        raise Forbidden("Web pages of other origins may not use this API.")
    if not has_key and _is_loopback((scope.get("server") or ("",))[0]) and not _is_local_name(headers.get("host", "")):
        where = "Weir listens on loopback only: ask it at http://127.0.0.1 or http://localhost, or send a key."
        raise Forbidden(f"This name may not be used without a key. {where}")


def _is_of_this_origin(headers: Mapping[str, str]) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False


def _is_local_name(host: str) -> bool:
    """Whether a ``Host`` is an address, which no name server can bind to another, or a name of this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return LOCAL.fullmatch(name) is not None or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(server: str) -> bool:
    return _is_address(server) and ip_address(server).is_loopback
