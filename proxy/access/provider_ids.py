"""Ownership of what a provider keeps: ids that a key received in an answer are that key's, and no
other key may name them.

Keys of Weir that go up with one credential of the operator's are one customer to the provider,
which keeps answers, conversations, files, batches and more for that customer. So every id that an
answer gives to such a key is remembered as its, by digest, and a request may name only those. A key
with the permission ``shared`` is not checked, nor is a caller with its own credential: there the
provider checks.

A history item that includes its content is no reference, whatever its id: clients always send those
back.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from urllib.parse import parse_qsl, unquote

import msgspec
from cachetools import LRUCache

from proxy.access.destination import Caller, Headers, Route, is_form
from proxy.config.values import UpstreamSettings
from proxy.errors import Busy, InvalidRequest, NotFound
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import ProviderIdsRow, StoreError
from proxy.wire.codec import NAMING, NAMING_WORDS, ClientRequest
from proxy.wire.raw import Raw, has_repeated_keys, split_array

log = logging.getLogger("weir.access")

SHARED = "shared"
REMEMBERED = 32_768
AWAITED = (0.1, 0.4)
"""Seconds until another process of a shared store has surely written what it gave to a client."""
MAX_ANSWER = 16 * 1024 * 1024

_OBJECTS_ONLY = frozenset({"prompt", "audio"})
"""Those of them that are ids only within an object: as a text they are what is said."""
_SAID = frozenset(
    {
        *(
            "metadata",
            "arguments",
            "parameters",
            "schema",
            "json_schema",
            "input_schema",
            "output_schema",
        ),
        *("properties", "env", "response_format", "output_config", "text_format"),
    }
)
"""Objects with free content: nothing in them is an id of the provider's."""
_ECHOED = frozenset({"tools", "variables", "attributes"})
"""What an answer says again as the request had it."""
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
"""Blocks of Messages whose ``input`` a model has made up."""
_ITEM_REFERENCE = "item_reference"
_INLINE = (
    *(
        "content",
        "encrypted_content",
        "output",
        "arguments",
        "result",
        "results",
        "queries",
        "code",
    ),
    *("action", "input", "tools", "operation", "approve"),
)
_FORM_FIELD = re.compile(
    rb'name="?(?:' + "|".join(sorted(NAMING)).encode() + rb')(?:\[[^\]"]*\])?["\s;]'
)
_COLLECTIONS = (
    *(("fine_tuning", "jobs"), ("messages", "batches"), ("chat", "completions")),
    *(
        (name,)
        for name in (
            "responses",
            "conversations",
            "files",
            "batches",
            "vector_stores",
            "containers",
        )
    ),
    *((name,) for name in ("uploads", "assistants", "threads", "evals", "videos", "skills")),
)
_METHODS_OF = frozenset({"compact", "input_tokens", "runs"})
"""Path segments in the place of an id that name an operation on a collection."""
_SEGMENT = re.compile(r"[A-Za-z0-9._:~@=+,$-]+")
_EVENTS = (
    *(b"response.created", b"response.output_item", b"response.completed", b"response.incomplete"),
    *(b"message_start", b"message_delta", b"content_block_start", b"thread."),
)
"""Names of the events that have ids for later requests."""
Named = tuple[str, str]


def is_judged(caller: Caller, upstream: UpstreamSettings) -> bool:
    """Whether a key is one of several for one credential of the operator's, and may not use
    another's ids.
    """
    return caller.name is not None and not upstream.passes_key and SHARED not in caller.allow


_NULL = msgspec.Raw(b"null")


class _Item(msgspec.Struct):
    type: str | None = None
    id: str | None = None
    content: msgspec.Raw = _NULL
    encrypted_content: msgspec.Raw = _NULL
    output: msgspec.Raw = _NULL
    arguments: msgspec.Raw = _NULL
    result: msgspec.Raw = _NULL
    results: msgspec.Raw = _NULL
    queries: msgspec.Raw = _NULL
    code: msgspec.Raw = _NULL
    action: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    operation: msgspec.Raw = _NULL
    approve: msgspec.Raw = _NULL


_ITEM = msgspec.json.Decoder(_Item)
_EMPTY = frozenset({b"null", b"[]", b"{}", b'""'})


def named_in_request(request: ClientRequest) -> Iterator[Named]:
    """The ids that a managed request names at its provider, each with the field that names it."""
    if has_repeated_keys(request.body, request.fields):
        yield from named_in_json(request.body)
        return
    array = request.codec.array
    for name, raw in request.fields.items():
        if name == array or name in _SAID:
            continue
        field = name.casefold()  # as Go's encoding/json reads it
        if field == array == "input":
            yield from _items(name, split_array(raw) or ())
        if field in NAMING or _mentions(raw):
            is_said = field == "conversation" and request.codec.link != "previous_response_id"
            yield from _named(name, _pairs(raw), "" if is_said else field)
    if request.messages is None:
        return
    mentioned = any(request.messages.mentions(word) for word in NAMING_WORDS)
    elements = split_array(request.messages.raw) or () if mentioned or array == "input" else ()
    for number, raw in enumerate(elements if mentioned else ()):
        if _mentions(raw):
            yield from _named(f"{array}[{number}]", _pairs(raw), "")
    if array == "input":
        yield from _items(array, elements)


def _mentions(raw: Raw) -> bool:
    whole = bytes(raw)
    return any(word.search(whole) for word in NAMING_WORDS)


def named_in_json(body: bytes) -> Iterator[Named]:
    """The ids that any other JSON object names; nothing where it is none. Raises InvalidRequest for
    one too deep.
    """
    value = _pairs(body)
    if not isinstance(value, _Pairs):
        return
    yield from _named("", value, "")
    for name, given in value:
        if name in ("items", "input") and isinstance(given, list):
            yield from _items(name, [json.dumps(_plain(each)).encode() for each in given])


def named_in_path(route: Route) -> Iterator[Named]:
    """The ids that a path names. Raises InvalidRequest for one that others may read in
    another way.
    """
    parts = [part for part in unquote(route.path).split("/") if part]
    if any(_SEGMENT.fullmatch(part) is None or not part.strip(".") for part in parts):
        raise InvalidRequest(
            "The path can be read in more than one way: send it as it is documented."
        )
    if (rest := _after_collection(parts)) and rest[0].casefold() not in _METHODS_OF:
        yield "path", rest[0]


def is_list(method: str, route: Route) -> bool:
    """Whether the answer is the list of all that the provider keeps of a kind."""
    return (
        method == "GET"
        and _after_collection([part for part in unquote(route.path).split("/") if part]) == []
    )


def _after_collection(parts: Sequence[str]) -> Sequence[str] | None:
    folded = [part.casefold() for part in parts]
    for names in _COLLECTIONS:
        if tuple(folded[: len(names)]) == names:
            return parts[len(names) :]
    return None


class _Pairs(list[tuple[str, object]]): ...


def _pairs(raw: Raw | memoryview) -> object:
    """A value with every occurrence of a key; None for what is not JSON."""
    try:
        return json.loads(bytes(raw), object_pairs_hook=_Pairs, parse_int=len, parse_float=len)
    except RecursionError:
        raise InvalidRequest("The request is nested too deeply to be judged.") from None
    except ValueError:
        return None


def _plain(value: object) -> object:
    if isinstance(value, _Pairs):
        return {name: _plain(each) for name, each in value}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _named(place: str, value: object, field: str) -> Iterator[Named]:
    """The ids within the value of ``field``, found with an explicit stack: it may be as deep as
    JSON can be read.
    """
    waiting: list[tuple[str, object, str]] = [(place, value, field)]
    while waiting:
        at, each, name = waiting.pop()
        is_naming = name in NAMING
        if isinstance(each, str):
            if is_naming and each and name not in _OBJECTS_ONLY:
                yield at, each
        elif isinstance(each, _Pairs):
            is_call = any(key == "type" and inner in _CALLS for key, inner in each)
            for key, inner in each:
                below = f"{at}.{key}" if at else key
                if is_naming and key == "id" and isinstance(inner, str) and inner:
                    yield below, inner
                elif key not in _SAID and not (is_call and key == "input"):
                    waiting.append((below, inner, key))
        elif isinstance(each, list):
            waiting += [(f"{at}[{number}]", inner, name) for number, inner in enumerate(each)]


def _items(array: str, elements: Iterable[Raw]) -> Iterator[Named]:
    for number, raw in enumerate(elements):
        place = f"{array}[{number}].id"
        try:
            item = _ITEM.decode(raw)
        except (ValueError, RecursionError):
            loose = _pairs(raw)
            ids = (
                [given for name, given in loose if name == "id"]
                if isinstance(loose, _Pairs)
                else []
            )
            yield from ((place, each) for each in ids if isinstance(each, str) and each)
            continue
        if item.id and _is_reference(item):
            yield place, item.id


def _is_reference(item: _Item) -> bool:
    if (item.type or "").casefold() == _ITEM_REFERENCE:
        return True
    return not any(_says(getattr(item, name)) for name in _INLINE)


def _says(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:8]).replace(b" ", b"") not in _EMPTY


def ids_in(body: bytes) -> set[str]:
    """Every id of the provider's that an answer gives, whole or as a stream of events."""
    found = set[str]()
    if body.lstrip()[:1] in (b"{", b"["):
        _collect(_loaded(body), found)
        return found
    for line in body.splitlines():
        if line.startswith(b"data:") and any(kind in line for kind in _EVENTS):
            _collect(_loaded(line[len(b"data:") :]), found)
    return found


def _loaded(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None


def _collect(value: object, found: set[str]) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            made_up = (
                _SAID | _ECHOED if each.get("type") not in _CALLS else _SAID | _ECHOED | {"input"}
            )
            for name, inner in each.items():
                if name in made_up:
                    continue
                is_naming = name == "id" or (name in NAMING and name not in _OBJECTS_ONLY)
                if is_naming and isinstance(inner, str) and inner:
                    found.add(inner)
                elif is_naming and isinstance(inner, list):
                    found.update(one for one in inner if isinstance(one, str))
                else:
                    waiting.append(inner)


class ProviderIds:
    """Which ids are whose: in memory first and bounded there, and in the store as digests."""

    def __init__(
        self, store: Store, write_queue: WriteBehindQueue, *, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._write_queue = write_queue
        self._clock = clock
        self._known: LRUCache[tuple[str, bytes], None] = LRUCache(REMEMBERED)

    def remember(self, tenant: str, ids: Iterable[str]) -> None:
        """Record ids as a tenant's; they are stored in the background."""
        digests = {_digest(each) for each in ids}
        new = tuple(each for each in digests if (tenant, each) not in self._known)
        self._hold(tenant, digests)
        if new:
            self._write_queue.put(ProviderIdsRow(tenant=tenant, digests=new, at=self._clock()))

    async def own(self, tenant: str, ids: Iterable[str]) -> set[str]:
        """Those of the ids that are the tenant's. Raises StoreError."""
        digests = {each: _digest(each) for each in ids}
        missing = {digest for digest in digests.values() if (tenant, digest) not in self._known}
        waits = iter(AWAITED if self._store.shared else ())
        while missing:
            found = await self._store.own_provider_ids(tenant, sorted(missing))
            self._hold(tenant, found)
            missing -= found
            pause = next(waits, None) if missing else None
            if pause is None:
                break
            await asyncio.sleep(pause)
        return {each for each, digest in digests.items() if digest not in missing}

    async def require(self, caller: Caller, named: Iterable[Named]) -> None:
        """NotFound for what is not the caller's, Busy where that cannot be known now."""
        fields = {each: field for field, each in named}
        if not fields:
            return
        try:
            own = await self.own(caller.tenant, fields)
        except StoreError as error:
            log.warning("whose an id is cannot be read from the store: %s", error)
            raise Busy(
                "Whose it is what this request names cannot be known now. Please try again."
            ) from None
        for each, field in fields.items():
            if each not in own:
                raise NotFound(
                    f"{field}: {each[:100]!r} is not on record as this key's. The operator can"
                    " allow what other keys made, or what was made elsewhere: give the key the"
                    f" permission {SHARED}.",
                    param=field,
                )

    async def require_relayed(
        self, caller: Caller, route: Route, *, query: bytes, headers: Headers, body: bytes | None
    ) -> None:
        """As :meth:`require` for a request that is not managed; raises InvalidRequest for what
        cannot be judged.
        """
        named = [*named_in_path(route)]
        said = parse_qsl(query.decode("latin-1"), max_num_fields=1_000) if query else []
        named += [(name, value) for name, value in said if name in NAMING]
        if body and is_form(headers):
            if _FORM_FIELD.search(body):
                raise InvalidRequest(
                    "Send the ids of what is at the provider as JSON: they are judged here."
                )
        elif body:
            named += named_in_json(body)
        await self.require(caller, named)

    async def listed(self, tenant: str, body: bytes) -> bytes:
        """A list of the provider's without what is not the tenant's. Raises TypeError for another
        body, StoreError.
        """
        value = _loaded(body)
        entries = value.get("data") if isinstance(value, dict) else value
        if not isinstance(entries, list):
            raise TypeError("no list")
        ids = [
            each["id"]
            for each in entries
            if isinstance(each, dict) and isinstance(each.get("id"), str)
        ]
        own = await self.own(tenant, ids)
        kept = [each for each in entries if isinstance(each, dict) and each.get("id") in own]
        if len(kept) == len(entries):
            return body
        return msgspec.json.encode({**value, "data": kept} if isinstance(value, dict) else kept)

    def _hold(self, tenant: str, digests: Iterable[bytes]) -> None:
        for each in digests:
            self._known[tenant, each] = None


def _digest(each: str) -> bytes:
    return blake2b(each.encode("utf-8", "surrogatepass"), digest_size=16).digest()
