"""The pages below ``/weir/ui`` as an ASGI application: the viewer, the page, and what it is drawn
with.

Every page calls the handlers of the management API with the viewer's rights; what it changes goes
through them too. Texts are escaped by the templates; nothing on a page comes from another origin,
and no script or style is inline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

import jinja2
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route, Router, request_response
from starlette.staticfiles import StaticFiles

from proxy.access.admission import refuse_foreign_pages
from proxy.dashboard import pages, panels, requests
from proxy.dashboard.charts import spark_of
from proxy.dashboard.visit import (
    FILTERS,
    PATH,
    SIGNED_IN,
    PageVisit,
    Redirect,
    Session,
    Sessions,
    View,
    cookie_in,
)
from proxy.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTooLarge,
    UnsupportedKind,
)
from proxy.http.request import NOT_KEPT, PROBLEMS, problem_of
from proxy.runtime import Runtime
from proxy.server import App
from proxy.stream import read_body

URL_FORM = "application/x-www-form-urlencoded"
MAX_SIGN_IN = 4 * 1024
MAX_FORM = 256 * 1024
MAX_FIELDS = 200
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
GUARDS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    **NOT_KEPT,
}
PUBLIC = frozenset({"login", "logout", "guest", "shared"})
"""Pages, or the beginnings of their paths, that need no session."""
Answer = View | Redirect | Response
Handler = Callable[[PageVisit], Awaitable[Answer]]

PAGES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "", pages.overview),
    ("GET", "login", pages.login),
    ("POST", "login", pages.sign_in),
    ("POST", "logout", pages.sign_out),
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
    ("GET", "conversations/{id}/requests/{rid}", requests.request),
    ("POST", "conversations/{id}/requests/{rid}", requests.share),
    ("GET", "shared/{token}", requests.shared),
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


class Assets(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        """A file under an address that has its digest: it never changes."""
        response = super().file_response(*args, **options)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        response.headers["x-content-type-options"] = "nosniff"
        return response


def site(runtime: Runtime) -> App:
    """The pages as an ASGI application."""
    shown = Pages(runtime)
    made = [
        Route(f"{PATH}/{path}".rstrip("/"), partial(shown.answer, handler), methods=[method])
        for method, path, handler in PAGES
    ]

    async def otherwise(visit: PageVisit) -> Answer:
        path = visit.request.scope["path"]
        methods = [
            page[0] for page, route in zip(PAGES, made, strict=True) if route.path_regex.match(path)
        ]
        if methods:
            raise MethodNotAllowed(
                f"{visit.request.method[:10]} is not answered here.", allowed=tuple(methods)
            )
        raise NotFound("There is no such page.")

    assets = Mount(f"{PATH}/static", Assets(packages=[("proxy.dashboard", "static")]))
    rest = Mount("", request_response(partial(shown.answer, otherwise)))
    return GZipMiddleware(
        Router([assets, *made, rest], redirect_slashes=False), minimum_size=1024, compresslevel=5
    )


class Pages:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions = Sessions(runtime)

    async def answer(self, handler: Handler, request: Request) -> Response:
        """A page for the viewer; an error is also a page."""
        session = self._sessions.guest()
        is_new = False
        visit = self._visit(request, session)
        answer: Answer
        response: Response
        try:
            known = await self._sessions.read(request.scope)
            is_new = known is None
            session = known or session
            visit = self._visit(request, session)
            self._refuse_foreign(visit)
            visit = replace(
                visit, query={name: value for name, value in request.query_params.items() if value}
            )
            answer, visit = await self._answer(handler, visit)
        except PROBLEMS as fault:
            error = problem_of(fault)
            answer = View("error.html", {"message": error.message}, error.status, error.headers())
        if isinstance(answer, Redirect):
            if answer.session is not None:
                session = answer.session
                is_new = True
            response = HTMLResponse(status_code=303, headers={"location": answer.to})
        elif isinstance(answer, View):
            response = HTMLResponse(
                await asyncio.to_thread(self._render, answer, visit), answer.status
            )
            response.raw_headers += answer.headers
        else:
            response = answer
        response.headers.update(GUARDS)
        if is_new:
            self._sessions.keep(session, request, response)
        return response

    def _refuse_foreign(self, visit: PageVisit) -> None:
        scope = visit.request.scope
        is_signed_in = bool(cookie_in(scope)) and visit.session.who in SIGNED_IN
        followed = _is_followed(visit.request)
        refuse_foreign_pages(scope, self._runtime.config, has_key=is_signed_in, followed=followed)

    async def _answer(self, handler: Handler, visit: PageVisit) -> tuple[Answer, PageVisit]:
        request = visit.request
        if (
            _is_followed(request)
            and not cookie_in(request.scope)
            and _site_of(request) == "cross-site"
        ):
            # No SameSite=Strict cookie comes where a link was followed from elsewhere: load it once
            # more, from here.
            return View("again.html", {}, headers=((b"refresh", b"0"),)), visit
        if visit.session.who == "nobody" and visit.room not in PUBLIC:
            query = request.scope["query_string"].decode("latin-1")
            here = f"{PATH}/{visit.at}{'?' if query else ''}{query}"
            wanted = f"?{urlencode({'next': here})}" if visit.at else ""
            return Redirect(f"{PATH}/login{wanted}"), visit
        if request.method == "POST":
            visit = replace(visit, form=await self._form(visit))
        if not self._runtime.write_queue.failing:
            await self._runtime.write_queue.flush()
        return await handler(visit), visit

    def _visit(self, request: Request, session: Session) -> PageVisit:
        runtime = self._runtime
        return PageVisit(
            runtime=runtime,
            request=request,
            session=session,
            caller=self._sessions.caller(session),
            token=self._sessions.token(session),
            at=request.scope["path"].removeprefix(PATH).strip("/"),
            path={name: unquote(part) for name, part in request.path_params.items()},
            query={},
            now=runtime.planner.clock(),
        )

    async def _form(self, visit: PageVisit) -> Mapping[str, list[str]]:
        kind = visit.request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != URL_FORM:
            raise UnsupportedKind(f"A form is sent as {URL_FORM} here.")
        # few bytes before the sender is known
        limit = MAX_SIGN_IN if visit.session.who == "nobody" or visit.at in PUBLIC else MAX_FORM
        try:
            body = await read_body(visit.request.receive, limit=limit)
        except RequestTooLarge:
            raise RequestTooLarge(
                f"The form is larger than {limit // 1024} KiB, the most that is read here."
            ) from None
        try:
            form = parse_qs(
                body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS
            )
        except ValueError:
            raise InvalidRequest(f"There are more than {MAX_FIELDS} fields.") from None
        self._sessions.check(visit.session, form.get("token", [""])[0])
        return form

    def _render(self, view: View, visit: PageVisit) -> bytes:
        template = _environment().get_template(view.template)
        shell = {
            "session": visit.session,
            "token": visit.token,
            "now": visit.now,
            "path": PATH,
            "page": visit.page,
        }
        text = template.render(visit=visit, **shell, assets=_assets(), hours=12, **view.values)
        return text.encode("utf-8", "replace")


def _is_followed(request: Request) -> bool:
    """Whether a browser follows a link to it."""
    return request.method in ("GET", "HEAD") and request.headers.get("sec-fetch-mode") == "navigate"


def _site_of(request: Request) -> str | None:
    return request.headers.get("sec-fetch-site")


@cache
def _assets() -> Mapping[str, str]:
    """The addresses of the files, by name."""
    folder = files("proxy.dashboard") / "static"
    digests = {each.name: sha256(each.read_bytes()).hexdigest()[:12] for each in folder.iterdir()}
    return {name: f"{PATH}/static/{name}?{digest}" for name, digest in digests.items()}


@cache
def _environment() -> jinja2.Environment:
    folder = files("proxy.dashboard") / "templates"
    texts = {
        each.name: each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith(".html")
    }
    made = jinja2.Environment(
        loader=jinja2.DictLoader(texts), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {**FILTERS, "cut": requests.cut, "is_cut": requests.is_cut}
    made.filters |= {"marked": requests.marked, "still_shown": requests.still_shown}
    made.filters |= {"px": "{:.1f}".format, "thousands": pages.thousands}
    made.globals |= {
        "quoted": lambda text: quote(str(text), safe=""),
        "acted": pages.acted,
        "spark_of": spark_of,
    }
    return made
