"""One request to the management API, taken apart, rows as JSON, and lists in pages.

openapi.json says what each answer has; the order of a row's fields is that of the JSON.
"""

import asyncio
import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta
from starlette.datastructures import MutableHeaders
from starlette.responses import Response

from proxy.access.destination import Caller
from proxy.config.values import moment_in
from proxy.errors import (
    Conflict,
    Forbidden,
    InvalidJSON,
    InvalidRequest,
    NotFound,
    ProxyError,
    RequestTooLarge,
)
from proxy.features.cache_use import facts_in
from proxy.runtime import Runtime
from proxy.server import App, Shutdown
from proxy.store import Store
from proxy.store.audit import REFUSED
from proxy.store.records import (
    NOT_READ_BACK,
    ConversationRow,
    ExchangeRow,
    StaleVersion,
    StoreError,
)
from proxy.store.transaction import Place
from proxy.stream import Receive, Send, read_body
from proxy.telemetry.metrics import Metrics
from proxy.wire import view_of_stored
from proxy.wire.chat import body_of
from proxy.wire.codec import CHAT, Codec
from proxy.wire.raw import split_array

Row = TypeVar("Row")

Json = dict[str, Any]


def fields_of(row: msgspec.Struct, *, without: Collection[str] = (), **own: object) -> Json:
    """The fields of a row as JSON has them, bytes as hexadecimal, those in ``own`` in their place
    or after them.
    """
    values = {**msgspec.structs.asdict(row), **own}
    plain = {name: each.hex() if isinstance(each, bytes) else each for name, each in values.items()}
    return dict(
        msgspec.to_builtins({name: each for name, each in plain.items() if name not in without})
    )


Zone = Literal["green", "yellow", "orange", "red", "critical"]
ZONES: tuple[Zone, ...] = get_args(Zone)
EMERGENCY = "emergency_compaction"
ACTED = frozenset({"evict_and_compress", "cross_window_save", EMERGENCY})
PREPARING = frozenset({"orange", "red", "critical"})


def decision_of(row: ExchangeRow) -> Json:
    """The decision record of one request."""
    before = row.pressure_before
    return {
        "action": row.action,
        "utilization_before": None if before is None else round(before, 4),
        "utilization_after": round(row.pressure, 4),
        "evicted_blocks": row.evicted,
        "compression_strategy": row.strategy or None,
        "recommendation": _recommendation(row),
        "new_window_id": row.detail.get("window_id"),
        "compaction_summary_tokens": row.detail.get("summary_tokens"),
    }


def _recommendation(row: ExchangeRow) -> str:
    """What an operator might do: ``enlarge`` where rungs were needed repeatedly or nothing helped,
    ``enforce`` where what was needed was only observed; where nothing was done, ``prepare`` from
    orange on and ``watch`` in yellow; else ``none``.
    """
    if row.detail.get("too_small") or row.outcome == REFUSED:
        return "enlarge"
    if row.action in ACTED:
        return "enforce" if row.observed else "none"
    if row.zone in PREPARING:
        return "prepare"
    return "watch" if row.zone == "yellow" else "none"


def exchange_of(row: ExchangeRow) -> Json:
    """One request of a conversation; what the next one is planned from is not shown."""
    return fields_of(
        row,
        without=NOT_READ_BACK,
        **facts_in(row.detail),
        layers=row.detail.get("layers", []),
        decision=decision_of(row),
    )


JSON = "application/json"
OWN = "/weir/{rest}"
"""The route under which requests to Weir's own pages and API are counted."""
NOT_KEPT = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Headers of every answer: what one key receives is cached for nobody else, and shown as the type
that it declares.
"""
MAX_ROWS = 500
MAX_DIGITS = 15
MAX_VERSION_DIGITS = 9
MAX_PARAMETERS = 20
MAX_BODY = 64 * 1024
MAX_NAME_LEN = 256
MAX_NAMES = 100_000
MAX_CURSOR_LEN = 1_024
EXACT = 2**53  # what a JSON number holds exactly
IN_CURSOR: Mapping[type, object] = {
    str: Annotated[str, Meta(pattern=r"^[^\0]*\Z")],  # PostgreSQL takes no NUL
    int: Annotated[int, Meta(gt=-EXACT, lt=EXACT)],
    float: Annotated[float, Meta(gt=-EXACT, lt=EXACT)],
}
NAMES_SHOWN = 5
DAYS = 30
DOLLAR_DIGITS = 6


Word = TypeVar("Word", bound=str)
PlaceOf = Callable[[Row], Place]


def as_json(value: object, *, status: int = 200) -> Response:
    plain = msgspec.to_builtins(value)
    try:
        body = json.dumps(plain, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        body = json.dumps(plain).encode()
    return Response(body, status, media_type=JSON)


PROBLEMS = (ProxyError, StoreError)
"""Exceptions that are no fault of Weir's code."""


def problem_of(error: Exception) -> ProxyError:
    if isinstance(error, StaleVersion):
        return Conflict("A request of this conversation came first: try again.")
    if isinstance(error, StoreError):
        return ProxyError(f"The store cannot do this now: {type(error).__name__}. Try again.")
    return error if isinstance(error, ProxyError) else ProxyError("Internal server error.")


def as_error(error: ProxyError, *, request_id: str | None = None, codec: Codec = CHAT) -> Response:
    response = Response(codec.error_body(error), error.status, media_type=JSON)
    response.raw_headers += error.headers()
    if request_id is not None:
        response.headers["x-request-id"] = request_id
    return response


class ManagementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the management API; an impossible one raises InvalidRequest.

    Attributes:
        tenant: whose key was sent, None for the operator with the admin token.
        caller: that key, None for the operator.
        path: the parts of the path that the route names.
        query: the parameters after the question mark.
        receive: where the body is read from.
        rows: how many rows the route gives where no limit is requested, ``most`` how many at most.
    """

    runtime: Runtime
    tenant: str | None
    path: Mapping[str, str]
    query: Mapping[str, str]
    receive: Receive
    rows: int = MAX_ROWS
    most: int = MAX_ROWS
    shutdown: Shutdown = Shutdown()
    caller: Caller | None = None

    @property
    def key(self) -> str | None:
        """The key under which the caller's usage is added up: empty for an unknown one, None for
        the operator.
        """
        if self.tenant is None:
            return None
        return "" if self.caller is None else self.caller.account

    @property
    def store(self) -> Store:
        return self.runtime.store

    def own(self) -> str:
        """The tenant whose originals are read. Raises Forbidden for the operator."""
        if self.tenant is None:
            raise Forbidden("Originals are read with the key of the caller that sent them.")
        return self.tenant

    def limit(self) -> int:
        given = self.query.get("limit", str(self.rows))
        if not given.isascii() or not given.isdigit() or int(given[:MAX_DIGITS]) < 1:
            raise InvalidRequest("limit must be a number from 1 on.", param="limit")
        return min(self.most, int(given[:MAX_DIGITS]))

    def after(self, *kinds: type[str] | type[int] | type[float]) -> Place | None:
        cursor = self.query.get("cursor")
        if cursor is None:
            return None
        shape: Any = tuple[tuple(IN_CURSOR[kind] for kind in kinds)]  # type: ignore[misc]  # made at run time
        try:
            given = cursor[: MAX_CURSOR_LEN + 1].encode("ascii")
            return list(
                msgspec.json.decode(urlsafe_b64decode(given + b"=" * (-len(given) % 4)), type=shape)
            )
        except (ValueError, RecursionError):
            raise InvalidRequest(
                "cursor must be the next of the page before, as it was given.", param="cursor"
            ) from None

    def start(self) -> int:
        after = self.after(int)
        return 0 if after is None else max(0, int(after[0]))

    def word(self, name: str, known: tuple[Word, ...]) -> Word | None:
        given = self.query.get(name)
        for word in known:
            if word == given:
                return word
        if given is not None:
            raise InvalidRequest(f"{name} must be one of {', '.join(known)}.", param=name)
        return None

    def flag(self, name: str) -> bool | None:
        given = self.query.get(name)
        if given is not None and given not in {"true", "false"}:
            raise InvalidRequest(f"{name} must be true or false.", param=name)
        return None if given is None else given == "true"

    def since(self, default: str) -> float:
        """The requested time, seconds since 1970; that of ``default`` where none is."""
        try:
            return moment_in(self.query.get("since", default), now=self.runtime.planner.clock())
        except ValueError as fault:
            raise InvalidRequest(f"since {fault}", param="since") from None

    def version(self) -> int:
        given = self.path["version"]
        if not (given.isascii() and given.isdigit() and len(given) <= MAX_VERSION_DIGITS):
            raise InvalidRequest("version must be a number.", param="version")
        return int(given)

    async def conversation(self, name: str | None = None) -> ConversationRow:
        """The caller's conversation with this name or id, that of the path without one; for the
        operator the one used last. Raises NotFound.
        """
        name = self.path["id"] if name is None else name
        row = None
        if len(name) <= MAX_NAME_LEN and name.isprintable():
            row = await self.store.conversation(self.tenant, name)
        if row is None:
            raise NotFound(f"There is no conversation {name[:80]!r}.")
        return row

    async def only_conversation(self) -> ConversationRow:
        """The conversation in the path, to be changed: no other key's may have its name."""
        row = await self.conversation()
        if self.tenant is not None:
            return row
        name = self.path["id"]
        rows = await self.store.conversations(None, limit=MAX_NAMES)
        ids = sorted(each.id for each in rows if name in (each.name, each.id))
        if len(ids) > 1:
            text = (
                f"{len(ids)} conversations of different keys are called {name[:80]!r}: name one by"
                " its id."
            )
            raise InvalidRequest(text, param="id", weir={"ids": ids[:NAMES_SHOWN]})
        return row

    async def body(self, limit: int) -> bytes:
        try:
            return await read_body(self.receive, limit=limit)
        except RequestTooLarge:
            raise RequestTooLarge(
                f"The body is larger than {limit} bytes, the most that is read here."
            ) from None

    async def fields(self, known: Collection[str]) -> dict[str, object]:
        """The fields of the body, none but ``known`` ones; an empty body has none."""
        body = await self.body(MAX_BODY)
        try:
            value = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidJSON("The body is not JSON.") from None
        if not isinstance(value, dict):
            raise InvalidRequest("The body must be a JSON object.", param="body")
        for name in value:
            if name not in known:
                there = f"there are {', '.join(known)}" if known else "the body has none here"
                raise InvalidRequest(f"There is no field {name[:40]!r}: {there}.", param=name[:40])
        return value


def query_of(raw: bytes, known: Collection[str]) -> dict[str, str]:
    """The parameters of a query string. Raises InvalidRequest for one that is not ``known`` or
    comes twice.
    """
    try:
        given = parse_qs(
            raw.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_PARAMETERS
        )
    except ValueError:
        raise InvalidRequest(f"There are more than {MAX_PARAMETERS} parameters.") from None
    for name, values in given.items():
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none here"
            raise InvalidRequest(f"There is no parameter {name[:40]!r}: {there}.", param=name[:40])
        if len(values) > 1:
            raise InvalidRequest(f"{name} is given {len(values)} times.", param=name)
    return {name: values[0] for name, values in given.items()}


def cursor_of(place: Place) -> str:
    return (
        urlsafe_b64encode(json.dumps(list(place), separators=(",", ":")).encode())
        .rstrip(b"=")
        .decode()
    )


def page(rows: Sequence[Row], limit: int, show: Callable[[Row], Json], place: PlaceOf[Row]) -> Json:
    """A page of ``rows``, of which there is one beyond ``limit`` where another page follows."""
    following = cursor_of(place(rows[limit - 1])) if len(rows) > limit else None
    return {"data": [show(row) for row in rows[:limit]], "next": following}


def page_from(rows: Sequence[Row], start: int, limit: int, show: Callable[[Row], Json]) -> Json:
    """A page of a list whose cursor is a number of rows."""
    following = cursor_of((start + limit,)) if len(rows) > start + limit else None
    return {"data": [show(row) for row in rows[start : start + limit]], "next": following}


def page_of_whole(
    rows: Sequence[Row],
    wanted: tuple[int, Place | None],
    show: Callable[[Row], Json],
    place: PlaceOf[Row],
) -> Json:
    """A page of a list that is there as a whole; ``wanted`` is how many rows, and the place after
    which they come.
    """
    limit, after = wanted
    start = 0
    if after is not None:
        found = [at for at, row in enumerate(rows) if list(place(row)) == list(after)]
        if not found:
            raise gone()
        start = found[0] + 1
    return page(rows[start : start + limit + 1], limit, show, place)


def gone() -> InvalidRequest:
    return InvalidRequest(
        "What cursor points at is not in the list any more: begin again without it.", param="cursor"
    )


class Counted:
    """ASGI middleware: requests are counted under one route, and every answer has ``headers``."""

    def __init__(
        self, app: App, *, metrics: Metrics, route: str = OWN, headers: Mapping[str, str] = {}
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._route = route
        self._headers = headers

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        status = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._metrics.observe_request(
                method=scope["method"],
                route=self._route,
                status=status or None,
                error=str(status) if status >= 500 else "",
                seconds=time.perf_counter() - begun,
            )


PAGE = 64 * 1024
TEXT = "text/plain"


async def page_of_bytes(body: bytes, cursor: int, *, as_text: bool = False) -> Response:
    """One page of ``body`` from a cursor on, as JSON or as its text.

    Cursors count bytes, and a page ends between two characters. ``x-weir-size`` and
    ``x-weir-sha256`` are those of the whole, ``x-weir-end`` is true on the last page, and
    ``x-weir-cursor`` leads to the next one.
    """
    return await asyncio.to_thread(_page, body, cursor, as_text=as_text)


def cursor_in(request: ManagementRequest) -> int:
    given = request.query.get("cursor", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS):
        raise InvalidRequest("cursor must be a number of bytes.", param="cursor")
    return int(given)


def _page(body: bytes, start: int, *, as_text: bool) -> Response:
    whole = _text_of(body) if as_text else body
    stop = min(len(whole), start + PAGE)
    while start + 4 < stop < len(whole) and whole[stop] & 0xC0 == 0x80:
        stop -= 1
    response = Response(whole[start:stop], media_type=TEXT if as_text else JSON)
    response.headers["x-weir-size"] = str(len(whole))
    response.headers["x-weir-sha256"] = sha256(whole).hexdigest()
    response.headers["x-weir-end"] = "false" if stop < len(whole) else "true"
    if stop < len(whole):
        response.headers["x-weir-cursor"] = str(stop)
    return response


def _text_of(body: bytes) -> bytes:
    messages = split_array(body) if body.startswith(b"[") else (body,)
    return "\n".join(body_of(view_of_stored(raw)).whole for raw in messages or ()).encode(
        "utf-8", "surrogatepass"
    )
