"""Who views the pages (a signed cookie, and the token that every form carries), what is requested,
and how values look.

Nothing is kept in the process, so any replica answers: the signing key is derived from the secret
that all of them read from the store, which also knows the sessions that were ended by signing out.
A session ends after twelve hours, too, with the key that it was opened with, or with another admin
token.
"""

import datetime as dt
import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response

from proxy.access.admission import identify, same_secret
from proxy.access.destination import Caller
from proxy.errors import Forbidden, InvalidAPIKey
from proxy.http.request import MAX_ROWS, ManagementRequest
from proxy.runtime import Runtime
from proxy.store.records import DAY

COOKIE = "weir_session"
PATH = "/weir/ui"
HOURS = 12
LIFETIME = HOURS * 3600.0
MAX_COOKIE_LEN = 1_024
ENDED = "signed-out:"
SHARED = "shared:"
SHARED_DAYS = 7
T = TypeVar("T")
Who = Literal["nobody", "guest", "caller", "operator"]
SIGNED_IN = frozenset({"caller", "operator"})


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One visitor.

    ``nobody`` before signing in, a ``guest`` who sends no key where none is needed, a ``caller``
    with a key, or the ``operator``. A guest's cookie proves nothing: a name that leads here is
    given one too (DNS rebinding).
    """

    who: Who
    tenant: str
    key: str
    nonce: str
    until: float

    @classmethod
    def begun(cls, who: Who, *, now: float, caller: Caller | None = None) -> Self:
        tenant, key = ("", "") if caller is None else (caller.tenant, caller.key)
        return cls(
            who=who, tenant=tenant, key=key, nonce=secrets.token_urlsafe(12), until=now + LIFETIME
        )

    @property
    def reads_as(self) -> str | None:
        return None if self.who == "operator" else self.tenant


class Sessions(msgspec.Struct, frozen=True):
    runtime: Runtime

    async def read(self, scope: MutableMapping[str, Any]) -> Session | None:
        """The session of a request; None without one, and for one that is forged, over, or of a key
        that is gone.

        Raises StoreError where it cannot be known whether somebody has signed out of it.
        """
        given = cookie_in(scope)
        body, _, signature = given.partition(".")
        if not body or len(given) > MAX_COOKIE_LEN:
            return None
        try:
            session = _decoded(body, Session)
        except (ValueError, RecursionError):
            return None
        is_ours = hmac.compare_digest(signature.encode(), self._sign(body, session.who).encode())
        if not is_ours or session.until < self.runtime.planner.clock():
            return None
        if session.who in ("guest", "caller") and self.caller(session) is None:
            return None
        if session.who in SIGNED_IN and await self._is_ended(session):
            return None
        return session

    async def end(self, session: Session) -> None:
        """Invalidate every copy of its cookie; the record of it is removed when the session would
        have ended.
        """
        if session.who in SIGNED_IN:
            name = ENDED + session.nonce
            await self.runtime.store.tell(
                name, "", until=session.until, at=self.runtime.planner.clock()
            )

    async def _is_ended(self, session: Session) -> bool:
        return bool(
            await self.runtime.store.facts([ENDED + session.nonce], self.runtime.planner.clock())
        )

    def caller(self, session: Session) -> Caller | None:
        return (
            self.runtime.keyring.again(session.key) if session.who in ("guest", "caller") else None
        )

    def keep(self, session: Session, request: Request, response: Response) -> None:
        """Have the client send the session from now on."""
        body = _encoded(session)
        response.set_cookie(
            COOKIE,
            f"{body}.{self._sign(body, session.who)}",
            max_age=int(LIFETIME) if session.who != "nobody" else None,
            path=PATH,
            secure=self._is_encrypted(request),
            httponly=True,
            samesite="strict",
        )

    def guest(self) -> Session:
        now = self.runtime.planner.clock()
        try:
            return Session.begun("guest", now=now, caller=self.runtime.keyring.identify({}))
        except InvalidAPIKey:
            return Session.begun("nobody", now=now)

    def sign_in(self, scope: MutableMapping[str, Any], credential: str) -> Session:
        """The session of a key or of the admin token. Raises InvalidAPIKey, RateLimited as the API
        does.
        """
        now = self.runtime.planner.clock()
        token = self.runtime.config.admin_token
        if token is not None and same_secret(credential, token.get_secret_value()):
            return Session.begun("operator", now=now)
        header = (b"authorization", b"Bearer " + credential.encode("utf-8", "surrogateescape"))
        keyring = self.runtime.keyring
        said = [each for each in scope["headers"] if each[0] == keyring.header]
        caller = identify(
            {**scope, "headers": [header, *said]}, keyring, self.runtime.auth_throttle
        )
        return Session.begun("caller", now=now, caller=caller)

    def link_to(self, session: Session, conversation: str, request: str) -> str:
        """A token that opens one request's page to its bearer, and nothing else."""
        until = self.runtime.planner.clock() + SHARED_DAYS * DAY
        opened = msgspec.structs.replace(session, until=until)
        body = _encoded([opened, conversation, request])
        return f"{body}.{self._sign(SHARED + body, session.who)}"

    def opened(self, token: str) -> tuple[Session, str, str] | None:
        """What a token opens: the session to read it with, the conversation and the request; None
        where it has ended or is forged.
        """
        body, _, signature = token.partition(".")
        try:
            session, conversation, request = _decoded(body, tuple[Session, str, str])
        except (ValueError, RecursionError):
            return None
        expected = self._sign(SHARED + body, session.who)
        is_ours = hmac.compare_digest(signature.encode(), expected.encode())
        if not is_ours or session.until < self.runtime.planner.clock():
            return None
        if self.caller(session) is None:
            return None
        return session, conversation, request

    def token(self, session: Session) -> str:
        return hmac.new(self._key, b"form" + session.nonce.encode(), sha256).hexdigest()

    def check(self, session: Session, given: str) -> None:
        """Nothing, or Forbidden for a form that was not given to this visitor."""
        if not hmac.compare_digest(self.token(session).encode(), given.encode("utf-8", "replace")):
            raise Forbidden(
                "This form is too old, or not from here: load the page anew and send it again."
            )

    def _is_encrypted(self, request: Request) -> bool:
        scheme = request.headers.get("x-forwarded-proto", "")
        if request.scope["scheme"] == "https" or scheme.split(",")[0].strip() == "https":
            return True
        origin = request.headers.get("origin", "").lower()
        return origin.startswith("https://") and origin == self.runtime.config.public_origin

    @property
    def _key(self) -> bytes:
        return hmac.digest(self.runtime.secret, b"weir-dashboard", "sha256")

    def _sign(self, body: str, who: Who) -> str:
        """An operator's session ends with the token that it was opened with."""
        token = self.runtime.config.admin_token if who == "operator" else None
        bound = b"" if token is None else sha256(token.get_secret_value().encode()).digest()
        return hmac.new(self._key, bound + body.encode("utf-8", "replace"), sha256).hexdigest()


def _encoded(value: object) -> str:
    return urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def _decoded(body: str, kind: type[T]) -> T:
    """Raises ValueError for what is not of that kind."""
    return msgspec.json.decode(urlsafe_b64decode(body + "=="), type=kind)


def cookie_in(scope: MutableMapping[str, Any]) -> str:
    """The value of the session's cookie, empty without one; an unsigned one may be longer than any
    of Weir's.
    """
    return Request(scope).cookies.get(COOKIE, "")


class View(msgspec.Struct, frozen=True):
    template: str
    values: Mapping[str, Any]
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()


class Redirect(msgspec.Struct, frozen=True):
    to: str
    session: Session | None = None


DONE = {
    "compact": "The next request is compacted, whatever its size.",
    "close": "Closed. A request that continues it opens it again.",
    "note": "Noted.",
    "rollback": "Rolled back: the batches since then are undone.",
    "pin": "Pinned: it comes back with the next request, and stays.",
    "set-policy": "Set. It holds from the next request on.",
    "remove-policy": "Removed.",
    "limit-key": "The limits are set: they hold from the key's next request on.",
    "revoke-key": "Revoked: the key's next request is refused.",
    "forget": "Forgotten.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageVisit:
    """One request for a page.

    Attributes:
        at: the path below the dashboard's own.
        path: the parts of it that the route names.
        query: the parameters, those that are empty left out.
        form: the fields of the form that was sent.
        now: seconds since 1970.
    """

    runtime: Runtime
    request: Request
    session: Session
    caller: Caller | None
    token: str
    at: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    now: float
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_operator(self) -> bool:
        return self.session.who == "operator"

    @property
    def room(self) -> str:
        return self.at.partition("/")[0]

    @property
    def done(self) -> str | None:
        """What was just done, in Weir's words: an address names it, and has no words of its own."""
        return DONE.get(self.query.get("done", ""))

    @property
    def page(self) -> str:
        """The address of the conversation that the path names."""
        return f"{PATH}/conversations/{quote(self.path.get('id', ''), safe='')}"

    def field(self, name: str) -> str:
        return next(iter(self.form.get(name, ())), "")

    def api_request(
        self,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        body: object = None,
        rows: int = 50,
    ) -> ManagementRequest:
        """A request to the management API with the viewer's own rights."""
        data = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            data = json.dumps(body).encode()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        return ManagementRequest(
            runtime=self.runtime,
            tenant=self.session.reads_as,
            path=self.path if path is None else path,
            query={} if query is None else query,
            receive=receive,
            rows=rows,
            most=max(rows, MAX_ROWS),
            shutdown=self.request.state.shutdown,
            caller=None if self.is_operator else self.runtime.keyring.again(self.session.key),
        )

    @property
    def origin(self) -> str:
        """Scheme and host that the visitor's browser has used, or those of the configuration."""
        return (
            self.runtime.config.public_origin
            or f"{self.request.url.scheme}://{self.request.url.netloc}"
        )

    def only_operator(self) -> None:
        if not self.is_operator:
            raise Forbidden(
                "This page is for the operator: sign in with the admin token (auth.admin_token)."
            )

    def given(self, *names: str) -> dict[str, str]:
        return {name: self.query[name] for name in names if name in self.query}

    def following(self, cursor: str | None) -> str | None:
        return None if cursor is None else self.link(cursor=cursor)

    def link(self, **changed: object) -> str:
        merged = {**self.query, **changed}
        kept = {name: str(value) for name, value in merged.items() if value is not None}
        return f"{PATH}/{self.at}{'?' if kept else ''}{urlencode(kept)}".removesuffix("/")


MINUTE = 60.0
HOUR = 3_600.0


def moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(at: float | None, now: float) -> Markup:
    if at is None:
        return Markup('<span class="none">never</span>')
    past = abs(now - at)
    steps = (
        (MINUTE, 1.0, "s"),
        (HOUR, MINUTE, "min"),
        (2 * DAY, HOUR, "h"),
        (float("inf"), DAY, "d"),
    )
    size, unit = next((size, unit) for below, size, unit in steps if past < below)
    iso = dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    said = f"in {round(past / size)} {unit}" if at > now else f"{int(past / size)} {unit} ago"
    said = "now" if past < 1 else said
    return Markup('<time datetime="{}" title="{}">{}</time>').format(iso, moment(at), said)


def compact(value: float) -> str | Markup:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(value) >= size:
            shown = value / (1e3 if unit == "K" else size)
            digits = 0 if abs(shown) >= 100 else 1
            return Markup('<span title="{}">{}</span>').format(
                f"{value:,.0f}", f"{shown:.{digits}f}{unit}"
            )
    return f"{value:,.0f}"


def dollars(value: float) -> Markup:
    digits = 2 if abs(value) >= 10 or value == 0 else 4
    return Markup('<span title="{}">{}</span>').format(
        f"{value:.6f} US dollars", f"{'-' * (value < 0)}${abs(value):,.{digits}f}"
    )


def milliseconds(value: float) -> str:
    return f"{value:,.{int(value < 100)}f} ms" if value < 10_000 else f"{value / 1000:,.1f} s"


def size_of(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


NOTHING = Markup('<span class="none" title="not known">&ndash;</span>')


def _if_known(shown: Callable[[float], str]) -> Callable[[float | None], Markup]:
    return lambda value: NOTHING if value is None else escape(shown(value))


FILTERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ago": ago,
        "moment": moment,
        "n": _if_known("{:,.0f}".format),
        "short": _if_known(compact),
        "pct": _if_known("{:.0%}".format),
        "usd": _if_known(dollars),
        "ms": _if_known(milliseconds),
        "bytes": _if_known(size_of),
        "words": lambda name: str(name).replace("_", " "),
        "edits": lambda actions: NOTHING if actions == "none" else actions,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
    }
)
