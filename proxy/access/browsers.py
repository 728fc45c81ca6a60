"""What a web page that somebody has open may not do behind the person's back.

A key is sent in a header that no browser adds by itself, so a page of another origin has none to send. What is left is
Weir where no key is needed: a page may send a simple POST across origins, or have its own name lead to 127.0.0.1 (DNS
rebinding) and be of the same origin then. The first says so in ``Origin`` or ``Sec-Fetch-Site``, the other in ``Host``.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from proxy.access.destination import Caller
from proxy.config.values import Config
from proxy.errors import Forbidden

OF_OTHERS = frozenset({"cross-site", "same-site"})
LOOKED_AT = frozenset({b"host", b"origin", b"sec-fetch-site"})
# Beside localhost the names that containers have for their host: public name servers know no .internal.
LOCAL = re.compile(r"(.+\.)?localhost\.?|host\.(docker|containers)\.internal", re.IGNORECASE)
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
GRANTS = b"access-control-"
ASK_FOR_A_KEY = "The operator of this proxy makes one with `weir keys create`."

Scope = MutableMapping[str, Any]
Headers = Sequence[tuple[bytes, bytes]]


def refuse_foreign_pages(scope: Scope, *, has_key: bool) -> None:
    """Nothing, or Forbidden for a request that a page of another origin has made, or one whose name was bound anew."""
    headers = _told(scope)
    if _is_of_another_page(headers):
        raise Forbidden("Web pages of other origins may not use this API.")
    if not has_key and _is_bound_anew(scope, headers):
        where = "Weir listens on loopback only: ask it at http://127.0.0.1 or http://localhost, or send a key."
        raise Forbidden(f"This name may not be used without a key. {where}")


def refuse_spending_pages(scope: Scope, caller: Caller, config: Config) -> None:
    """Nothing, or Forbidden for such a page where it has no key of its own: the operator would pay for it."""
    if has_own_key(scope, caller, config):
        return
    headers = _told(scope)
    if _is_of_another_page(headers):
        raise Forbidden(f"Web pages of other origins need a key that is known here. {ASK_FOR_A_KEY}")
    if _is_bound_anew(scope, headers):
        where = "Ask Weir at http://127.0.0.1 or http://localhost."
        raise Forbidden(f"This name needs a key that is known here. {where} {ASK_FOR_A_KEY}")


def has_own_key(scope: Scope, caller: Caller | None, config: Config) -> bool:
    """Whether nothing is done with a credential of the operator's, or with none at all.

    A preflight has no key, so it is believed that the request after it will have the one that it announces.
    """
    if caller is not None and caller.name is not None:
        return True
    if not all(upstream.passes_key for upstream in config.upstreams.values()):
        return False
    return (caller is not None and bool(caller.credential)) or _announces_a_key(scope)


def without_grants(answered: Headers, scope: Scope, caller: Caller | None, config: Config) -> Headers:
    """The headers of an upstream's answer; without those that let foreign pages read it, where it was not their key."""
    if not any(name.lower().startswith(GRANTS) for name, _ in answered) or has_own_key(scope, caller, config):
        return answered
    return [(name, value) for name, value in answered if not name.lower().startswith(GRANTS)]


def _told(scope: Scope) -> Mapping[str, str]:
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"] if n in LOOKED_AT}


def _announces_a_key(scope: Scope) -> bool:
    if scope["method"] != "OPTIONS":
        return False
    asked = (v.lower() for n, v in scope["headers"] if n == b"access-control-request-headers")
    return any(name.strip() in CREDENTIALS for value in asked for name in value.split(b","))


def _is_of_another_page(headers: Mapping[str, str]) -> bool:
    return headers.get("sec-fetch-site") in OF_OTHERS or not _is_of_this_origin(headers)


def _is_bound_anew(scope: Scope, headers: Mapping[str, str]) -> bool:
    return _is_loopback((scope.get("server") or ("",))[0]) and not _is_local_name(headers.get("host", ""))


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
