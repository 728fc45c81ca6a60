"""The pages below ``/weir/ui`` as an ASGI application: who looks, which page, and what it is drawn with.

Every page asks the handlers of the management API, as who looks; what it changes goes through them too.
Texts are escaped by the templates; nothing on a page comes from another origin, and no script or style stands in one.
"""

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

import jinja2
import msgspec
from markupsafe import Markup

from proxy.access.admission import refuse_foreign_pages
from proxy.dashboard import pages, panels
from proxy.dashboard.visit import FILTERS, PATH, SIGNED_IN, PageVisit, Redirect, Session, Sessions, View, cookie_in
from proxy.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ProxyError,
    RequestTooLarge,
    UnsupportedKind,
)
from proxy.http.request import ManagementAnswer, respond, respond_live
from proxy.http.table import NOT_KEPT
from proxy.runtime import Runtime
from proxy.store.records import StaleVersion, StoreError
from proxy.stream import ClientGone, Receive, Send, read_body

log = logging.getLogger("weir.dashboard")

Scope = MutableMapping[str, Any]
Answer = View | Redirect | ManagementAnswer
URL_FORM = b"application/x-www-form-urlencoded"
MAX_SIGN_IN = 4 * 1024
MAX_FORM = 256 * 1024
MAX_FIELDS = 200
HTML = b"text/html; charset=utf-8"
KINDS = {"js": b"text/javascript; charset=utf-8", "css": b"text/css; charset=utf-8", "svg": b"image/svg+xml"}
FOR_EVER = (b"cache-control", b"public, max-age=31536000, immutable")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
GUARDS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    *NOT_KEPT,
)
PUBLIC = frozenset({"login", "logout", "guest"})
Handler = Callable[[PageVisit], Awaitable[Answer]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "", pages.overview),
    ("GET", "login", pages.login),
    ("GET", "guest", pages.guest),
    ("GET", "live", pages.live),
    ("GET", "data/series", pages.series),
    ("GET", "conversations", pages.conversations),
    ("GET", "search", pages.search),
    ("GET", "conversations/{id}", pages.conversation),
    ("POST", "conversations/{id}/rollback", pages.rollback),
    ("POST", "conversations/{id}/pin", pages.pin),
    ("POST", "conversations/{id}/compact", pages.compact),
    ("POST", "conversations/{id}/close", pages.close),
    ("POST", "conversations/{id}/notes", pages.note),
    ("GET", "conversations/{id}/checkpoints/{version}", pages.checkpoint),
    ("GET", "conversations/{id}/requests/{rid}", pages.request),
    ("GET", "originals/{ref}", pages.original),
    ("GET", "policies", panels.policies),
    ("GET", "policies/{name}", panels.policy),
    ("POST", "policies/{name}", panels.save_policy),
    ("POST", "policies/{name}/delete", panels.delete_policy),
    ("GET", "keys", panels.keys),
    ("POST", "keys", panels.create_key),
    ("POST", "keys/{key}/rotate", panels.rotate_key),
    ("POST", "keys/{key}/limits", panels.limit_key),
    ("POST", "keys/{key}/revoke", panels.revoke_key),
    ("GET", "usage", panels.usage),
    ("GET", "usage.csv", panels.usage_csv),
    ("GET", "system", panels.system),
    ("POST", "system/forget", panels.forget),
)


class Site:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions = Sessions(runtime)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path(scope)
        if path.startswith("static/"):
            await _static(scope, send, path.removeprefix("static/"))
            return
        session = self._sessions.guest()
        is_new = False
        visit = self._visit(session, path)
        answer: Answer
        try:
            known = await self._sessions.read(scope)
            is_new = known is None
            session = known or session
            visit = self._visit(session, path)
            answer, visit = await self._answer(scope, receive, visit)
        except ClientGone:
            return
        except StaleVersion:
            answer = View("error.html", {"message": "A request of this conversation came first. Try again."}, 409)
        except StoreError as fault:
            answer = View("error.html", {"message": f"The store cannot do this now: {type(fault).__name__}."}, 500)
        except ProxyError as fault:
            answer = View("error.html", {"message": fault.message}, fault.status, tuple(fault.headers()))
        if isinstance(answer, Redirect):
            if answer.session is not None:
                session, is_new = answer.session, True
            answer = ManagementAnswer(b"", 303, HTML, [(b"location", answer.to.encode())])
        elif isinstance(answer, View):
            body = await asyncio.to_thread(self._render, answer, visit)
            body, packed = _packed(scope, body)
            answer = ManagementAnswer(body, answer.status, HTML, [*answer.headers, *packed])
        cookies = [(b"set-cookie", self._sessions.cookie(session, scope))] if is_new else []
        headers = [*answer.headers, *GUARDS, *cookies]
        if answer.stream is not None:
            await respond_live(scope, send, msgspec.structs.replace(answer, headers=headers))
        else:
            await respond(send, answer.body, status=answer.status, kind=answer.kind, headers=headers)

    async def _answer(self, scope: Scope, receive: Receive, visit: PageVisit) -> tuple[Answer, PageVisit]:
        method = scope["method"]
        session = visit.session
        path = visit.at
        followed = method in ("GET", "HEAD") and dict(scope["headers"]).get(b"sec-fetch-mode") == b"navigate"
        is_signed_in = bool(cookie_in(scope)) and session.who in SIGNED_IN
        refuse_foreign_pages(scope, self._runtime.config, has_key=is_signed_in, followed=followed)
        if followed and not cookie_in(scope) and dict(scope["headers"]).get(b"sec-fetch-site") == b"cross-site":
            # No SameSite=Strict cookie comes where a link was followed from elsewhere: load it once more, from here.
            return View("again.html", {}, 200, ((b"refresh", b"0"),)), visit
        visit = replace(visit, query=_query(scope))
        if session.who == "nobody" and path not in PUBLIC:
            wanted = f"?{urlencode({'next': _whole(scope)})}" if path else ""
            return Redirect(f"{PATH}/login{wanted}"), visit
        if method == "POST":
            visit = await self._with_form(visit, scope, receive)
            if path == "login":
                return await self._sign_in(visit, scope), visit
            if path == "logout":
                await self._sessions.end(session)
                return Redirect(f"{PATH}/login?out=1", Session.begun("nobody", now=visit.now)), visit
        handler, named = _route("GET" if method == "HEAD" else method, path)
        if not self._runtime.settler.failing:
            await self._runtime.settler.flush()
        visit = replace(visit, path=named)
        return await handler(visit), visit

    def _visit(self, session: Session, path: str) -> PageVisit:
        runtime = self._runtime
        return PageVisit(
            runtime=runtime,
            session=session,
            caller=self._sessions.caller(session),
            token=self._sessions.token(session),
            at=path,
            path={},
            query={},
            now=runtime.planner.clock(),
        )

    async def _with_form(self, visit: PageVisit, scope: Scope, receive: Receive) -> PageVisit:
        kind = dict(scope["headers"]).get(b"content-type", b"")
        if kind.partition(b";")[0].strip().lower() != URL_FORM:
            raise UnsupportedKind(f"A form is sent as {URL_FORM.decode()} here.")
        limit = _most(visit)
        try:
            body = await read_body(receive, limit=limit)
        except RequestTooLarge:
            raise RequestTooLarge(f"The form is larger than {limit // 1024} KiB, the most that is read here.") from None
        form = await asyncio.to_thread(_fields, body)
        self._sessions.check(visit.session, form.get("token", [""])[0])
        return replace(visit, form=form)

    async def _sign_in(self, visit: PageVisit, scope: Scope) -> Answer:
        wanted = visit.field("next")
        try:
            session = self._sessions.sign_in(scope, visit.field("key").strip())
        except ProxyError as fault:
            return View("login.html", {"problem": fault.message, "next": wanted}, fault.status)
        is_ours = (wanted == PATH or wanted.startswith((f"{PATH}/", f"{PATH}?"))) and wanted.isascii()
        is_ours = is_ours and wanted.isprintable()
        return Redirect(wanted if is_ours else PATH, session)

    def _render(self, view: View, visit: PageVisit) -> bytes:
        template = _environment().get_template(view.template)
        shell = {"session": visit.session, "token": visit.token, "now": visit.now, "path": PATH, "page": visit.page}
        text = template.render(visit=visit, **shell, assets=_assets(), hours=12, **view.values)
        return text.encode("utf-8", "replace")


def _route(method: str, path: str) -> tuple[Handler, dict[str, str]]:
    parts, others = path.split("/"), list[str]()
    for verb, pattern, handler in ROUTES:
        names = pattern.split("/")
        if len(names) == len(parts) and all(a == b or a.startswith("{") for a, b in zip(names, parts, strict=True)):
            if verb == method:
                named = {a.strip("{}"): unquote(b) for a, b in zip(names, parts, strict=True) if a.startswith("{")}
                return handler, named
            others.append(verb)
    if others:
        raise MethodNotAllowed(f"{method[:10]} is not answered here.", allowed=tuple(others))
    raise NotFound("There is no such page.")


def _path(scope: Scope) -> str:
    raw = scope.get("raw_path")
    whole = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else quote(scope["path"])
    return str(whole).removeprefix(PATH).strip("/")


def _whole(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    path = _path(scope)
    return f"{PATH}/{path}{'?' if query else ''}{query}"


def _most(visit: PageVisit) -> int:
    """The bytes of a form that are read: few before it is known who sends it."""
    if visit.session.who == "nobody" or visit.at in PUBLIC:
        return MAX_SIGN_IN
    return MAX_FORM


def _fields(body: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"There are more than {MAX_FIELDS} fields.") from None


def _query(scope: Scope) -> dict[str, str]:
    """The parameters behind the question mark, those that are empty left out. Raises InvalidRequest for too many."""
    given = _fields(scope.get("query_string", b""))
    return {name: values[0] for name, values in given.items() if values[0]}


def _packed(scope: Scope, body: bytes) -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
    if len(body) < 1024 or b"gzip" not in dict(scope["headers"]).get(b"accept-encoding", b""):
        return body, ()
    return gzip.compress(body, 5), ((b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))


@cache
def _assets() -> Mapping[str, str]:
    folder = files("proxy.dashboard") / "static"
    names = [each.name for each in folder.iterdir() if each.name.rpartition(".")[2] in KINDS]
    return {name: f"{PATH}/static/{name}?{_asset(name)[1]}" for name in names}


@cache
def _asset(name: str) -> tuple[bytes, str, bytes]:
    body = (files("proxy.dashboard") / "static" / name).read_bytes()
    return body, sha256(body).hexdigest()[:12], gzip.compress(body, 9)


async def _static(scope: Scope, send: Send, name: str) -> None:
    if name not in _assets():
        await respond(send, b"There is no such file.", status=404, kind=b"text/plain", headers=GUARDS)
        return
    body, _, zipped = _asset(name)
    takes = b"gzip" in dict(scope["headers"]).get(b"accept-encoding", b"")
    headers: Iterable[tuple[bytes, bytes]] = ((b"content-encoding", b"gzip"),) if takes else ()
    kind = KINDS[name.rpartition(".")[2]]
    kept = [FOR_EVER, (b"vary", b"accept-encoding"), (b"x-content-type-options", b"nosniff"), *headers]
    await respond(send, zipped if takes else body, kind=kind, headers=kept)


@cache
def _environment() -> jinja2.Environment:
    folder = files("proxy.dashboard") / "templates"
    texts = {each.name: each.read_text(encoding="utf-8") for each in folder.iterdir() if each.name.endswith(".html")}
    made = jinja2.Environment(
        loader=jinja2.DictLoader(texts), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {**FILTERS, "cut": pages.cut, "is_cut": pages.is_cut, "marked": pages.marked}
    made.globals |= {
        "meter": lambda *given: Markup(pages.meter(*given)),  # noqa: S704 - every text in it is escaped there
        "quoted": lambda text: quote(str(text), safe=""),
    }
    return made
