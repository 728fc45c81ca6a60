"""A client's request: its bytes, its fields as raw slices, its tools, and its history as segments.

Planning knows one form of a message, that of chat completions. A :class:`Codec` reads the JSON of
one endpoint so (``segments``, ``view``) and writes what was planned in the endpoint's own
(``edited``, ``own``, ``compose``). A *segment* is what planning takes for one message: here an
element of ``messages``, elsewhere a run of items or some blocks of a message. Its raw form is its
elements as they came, with commas between them.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pickle import PickleBuffer
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, overload

import msgspec

from policies.effects import Summarize
from policies.ledger import EditKind
from proxy.errors import InvalidRequest, ProxyError
from proxy.wire.chat import (
    MARK,
    content_with,
    dicts_in,
    marked_message,
    marker_within,
    read_message,
    without_media,
    without_reasoning,
)
from proxy.wire.raw import (
    Raw,
    elements_of,
    read_value,
    replace_fields,
    split_array,
    split_object,
    write_value,
)

ERROR = b"error"
OWN = b"weir:1:"
"""What a compaction of Weir's own begins with."""
SEAL = re.compile(OWN)
_MARKED = f'"{MARK}"'.encode()
SCHEMA_NAME = "working_notes"
REASONING_ROOM = 4_096

LimitField = Literal["max_tokens", "max_completion_tokens"]
"""The fields for the limit of a chat completion: reasoning models refuse the first.
"""

NOTHING: Mapping[str, Raw] = MappingProxyType({})
_BEGUN = f'"{secrets.token_hex(16)}"'.encode()
"""An element that no client sends."""
_MATTERS = re.compile(rb'"(?:usage"|error"|finish_reason"\s*:\s*"[^"]|index"\s*:\s*[1-9])')


class GivenAnswer(NamedTuple):
    """A whole answer: the ``elements`` that it adds to the array, with commas between, and its
    ``usage`` object.
    """

    id: str
    elements: bytes
    usage: object = None


class RawSegment(bytes):
    """Elements of a history, with what their codec has to know in addition to their bytes."""

    @classmethod
    def of(cls, data: bytes, **known: object) -> Self:
        segment = cls(data)
        segment.__dict__ |= known
        return segment

    def like(self, data: bytes) -> Self:
        """The same with other elements."""
        return self.of(data, **self.__dict__)


def like(raw: Raw, data: bytes) -> Raw:
    return raw.like(data) if isinstance(raw, RawSegment) else data


class Compacted(RawSegment):
    """An element up to a compaction of the provider's: the model does not see it."""


class SystemField(RawSegment):
    """The field that holds the system prompt, as a message."""


class NamingRun(RawSegment):
    """A segment whose ``meant`` also has what it only names; empty where it names nothing."""

    meant: bytes = b""

    def like(self, data: bytes) -> Self:
        return self.of(data, **{**self.__dict__, "meant": b""})


NAMING = frozenset(
    {
        *(
            "previous_response_id",
            "response_id",
            "conversation_id",
            "previous_message_id",
            "approval_request_id",
        ),
        *(
            "file_id",
            "input_file_id",
            "output_file_id",
            "error_file_id",
            "training_file",
            "validation_file",
        ),
        *(
            "file_ids",
            "vector_store_id",
            "vector_store_ids",
            "container",
            "container_id",
            "upload_id",
            "batch_id",
        ),
        *(
            "assistant_id",
            "thread_id",
            "run_id",
            "fine_tuning_job_id",
            "eval_id",
            "conversation",
            "prompt",
            "audio",
        ),
    }
)
"""Fields that name something at the provider: an id, several of them, or an object with an ``id``.
"""
NAMING_WORDS = (
    re.compile(rb'"(?:' + "|".join(sorted(NAMING)).encode() + rb')"\s*:'),
    re.compile(rb"\\u00(?:5[fF]|6|7[0-9aA])"),
)
"""One of those fields, and an escaped letter of a name, which no JSON writer produces by itself.
"""


Unseal = Callable[[str], str]


class Made(NamedTuple):
    """A compaction to be given: ``before`` and ``after`` are tokens of the history and of the text,
    ``at`` is s.
    """

    request: "ClientRequest"
    text: str
    sealed: str
    before: int
    after: int
    at: int
    name: str


class Compactions:
    """Compactions of one endpoint.

    Attributes:
        least: the smallest trigger that its provider takes, in tokens.
        are_ignored_elsewhere: whether servers of others answer a request for one as though it were
            not there.
    """

    least = 0
    are_ignored_elsewhere = False

    def request(
        self, fields: Mapping[str, Raw], trigger: int, /
    ) -> tuple[object, tuple[bytes, ...]]:
        """The value of ``context_management`` with which the provider compacts at ``trigger``
        tokens, and the beta features that it needs.
        """
        raise NotImplementedError

    def opened(self, elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
        """The elements with a message in the place of Weir's newest compaction; None where they
        have none.
        """
        raise NotImplementedError

    def answer(self, made: Made) -> bytes:
        """The whole answer with a compaction, or the events of it where a stream was requested."""
        raise NotImplementedError


def raw_blocks(raw: Raw) -> Sequence[Raw]:
    content = split_object(bytes(raw)).get("content", b"null")
    if bytes(content)[:1] == b"[":
        return split_array(content) or ()
    said = read_value(content)
    return (
        (write_value({"type": "text", "text": said}),)
        if isinstance(said, str) and said.strip()
        else ()
    )


def with_content(message: Raw, content: bytes) -> bytes:
    return object_of({**split_object(bytes(message)), "content": content})


class Codec:
    """Chat completions. The codecs of other endpoints override what differs.

    Attributes:
        name: the endpoint's, ``path`` what is put after an upstream's base URL.
        providers: those that carry out ``context_management`` themselves.
        array: the field that holds the history, ``system`` one that holds a system prompt
            separately.
        limits: fields for the length of the answer, the one that counts first.
        tool_fields: fields with definitions of tools.
        schema: the field that may hold a schema for the answer.
        text_type: the type of a part that is text.
        headers: what a request of Weir's own has to be sent with.
        link: the field by which a request goes on from what its provider holds; ``unlinked`` is
            what it says in one that goes on from nothing, None where it then is not there.
        created_with: fields of such a request that those which go on from it leave out.
        words: what is looked for in the array as it came, to read on only where it is mentioned;
            ``wall`` is the one of a compaction of the provider's: what precedes it is ignored once
            that has come.
        ends_with_reason: whether the event with the reason for which an answer ended is its last.
        joins: whether adjacent elements of an assistant's are one segment.
        words_of_element: fields of an element of the array that are strings wherever they are
            there.
        compactions: how compactions are written, None where the endpoint has none.
        binds_thinking: whether models sign their thinking for what precedes it.
        has_recall_tool: whether the recall tool can be added; elsewhere there is the MCP server.
        has_translated_edits: whether a gateway may translate ``context_management`` for a provider
            that carries it out.
        is_element_a_message: whether each message is one element of the array.
    """

    headers: tuple[tuple[bytes, bytes], ...] = ()
    name = "chat"
    path = "/chat/completions"
    array = "messages"
    providers: frozenset[str] = frozenset()
    system: str | None = None
    link: str | None = None
    unlinked: bytes | None = None
    created_with: tuple[str, ...] = ()
    limits: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    tool_fields: tuple[str, ...] = ("tools", "functions")
    schema = "response_format"
    text_type = "text"
    words: tuple[re.Pattern[bytes], ...] = NAMING_WORDS
    wall: re.Pattern[bytes] | None = None
    ends_with_reason = False
    joins = False
    words_of_element: tuple[str, ...] = ("role",)
    compactions: Compactions | None = None
    binds_thinking = False
    has_recall_tool = True
    has_translated_edits = True
    is_element_a_message = True

    @property
    def counted(self) -> tuple[str, ...]:
        return (*self.tool_fields, self.schema)

    def parse(self, body: bytes) -> "ClientRequest":
        """The request in ``body``. Raises InvalidJSON or InvalidRequest."""
        return self._request(body, split_object(body))

    def parse_after(self, body: bytes, begun: "Beginning") -> "ClientRequest | None":
        """The same, of which only what follows a beginning is read; None where it does not go on as
        that did.

        One string replaces the elements of the beginning: with it the rest is JSON if the whole is.
        """
        start = begun.start + 1
        size = begun.size
        short = body[:start] + _BEGUN + body[size:]
        try:
            fields = dict(split_object(short))
        except ProxyError:
            return None
        rest = fields.get(self.array)
        if (
            not isinstance(rest, msgspec.Raw)
            or bytes(memoryview(rest)[1 : 1 + len(_BEGUN)]) != _BEGUN
        ):
            return None
        end = size + len(rest) - len(_BEGUN) - 1
        fields[self.array] = msgspec.Raw(memoryview(body)[begun.start : end])
        return self._request(body, fields, rest, begun.words)

    def _request(
        self,
        body: bytes,
        fields: Mapping[str, Raw],
        rest: Raw | None = None,
        words: Collection[re.Pattern[bytes]] = (),
    ) -> "ClientRequest":
        model = read_value(fields["model"]) if "model" in fields else None
        if model is not None and not isinstance(model, str):
            raise InvalidRequest("model must be a string.", param="model")
        raw = fields.get(self.array)
        messages = None
        if raw is not None and bytes(memoryview(raw)[:1]) == b"[":
            messages = Segments(raw, self, self._head(fields), rest=rest, words=words)
        limit, most = self._output_limit(fields)
        return ClientRequest(
            body=body,
            fields=fields,
            messages=messages,
            model=model or "",
            stream="stream" in fields and read_value(fields["stream"]) is True,
            max_tokens=most,
            limit=limit,
            codec=self,
        )

    def _output_limit(self, fields: Mapping[str, Raw]) -> tuple[str, int | None]:
        for name in self.limits:
            value = read_value(fields[name]) if name in fields else None
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return name, value
        return self.limits[-1], None

    def _head(self, fields: Mapping[str, Raw]) -> Sequence[Raw]:
        said = bytes(fields.get(self.system, b"null")) if self.system is not None else b"null"
        return () if said == b"null" else (SystemField(message_of("system", said)),)

    def least_output(self, request: "ClientRequest") -> int:
        return 0

    def is_held_elsewhere(self, fields: Mapping[str, Raw]) -> bool:
        return False

    def is_aside(self, fields: Mapping[str, Raw]) -> bool:
        """Whether the request is about the conversation and no part of it: a compaction by the
        provider.
        """
        return False

    def gives_ids(self, fields: Mapping[str, Raw]) -> bool:
        """Whether the answer may have ids that later requests of the caller name."""
        return "audio" in fields or bytes(fields.get("store", b"")) == b"true"

    def counted_answer(self, tokens: int) -> bytes:
        """The answer to a request that only counts."""
        return write_value({"input_tokens": tokens})

    def with_unbound_dropped(self, body: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """The body with which the provider leaves out thinking that is no longer valid, and the
        beta features that it needs.
        """
        return body, ()

    # What the provider holds between two requests

    def parent(self, fields: Mapping[str, Raw]) -> str | None:
        return None

    def is_kept(self, fields: Mapping[str, Raw]) -> bool:
        return False

    def added(self, fields: Mapping[str, Raw]) -> bytes:
        """The elements of the array that the request has, with commas between."""
        said = bytes(fields.get(self.array, b"[]")).strip()
        return said[1:-1].strip() if said[:1] == b"[" else b""

    def answer(self, body: bytes) -> GivenAnswer | None:
        return None

    def named(self, elements: bytes, reasoned: int) -> Mapping[str, Raw]:
        return {}

    def names(self, request: "ClientRequest") -> Mapping[str, bool]:
        """The elements that the provider has to know, and whether a name is all that the request
        has of them.
        """
        return {}

    def resolved(self, raw: Raw, known: Mapping[str, Raw]) -> Raw:
        return raw

    def schema_of(self, request: "ClientRequest") -> Any:
        return request.value(self.schema)

    # From the endpoint's JSON to messages

    def segments(self, elements: Sequence[Raw]) -> Sequence[Raw]:
        return elements

    def view(self, raw: Raw) -> Mapping[str, Any]:
        return read_message(raw)

    def goes_on(self, array: "Segments") -> bool:
        """Whether the segments of an array stay what they are, whatever follows them."""
        return self.wall is None or not array.mentions(self.wall)

    def is_closed(self, role: str) -> bool:
        """Whether a segment at the array's end is whole, so that elements that follow make segments
        of their own.
        """
        return not (self.joins and role == "assistant")

    # From what was planned to the endpoint's JSON

    def edited(self, raw: Raw, kind: EditKind | None, text: str) -> Raw:
        value = dict(read_message(raw))
        value.pop(MARK, None)
        if kind is EditKind.REASONING:
            value = without_reasoning(value)
        elif kind is EditKind.MEDIA:
            value = without_media(value, text.split("\n"))
        else:
            value["content"] = content_with(text, marker_within(value.get("content")))
        return write_value(value)

    def own_marks(self, raws: Sequence[Raw]) -> frozenset[int]:
        return frozenset(
            [i for i, raw in enumerate(raws) if _MARKED in bytes(raw) and MARK in self.view(raw)]
        )

    def unmarked(self, raw: Raw) -> Raw:
        if _MARKED not in bytes(raw):
            return raw
        return like(raw, b",".join(write_value(self.bare(each)) for each in objects_in(raw)))

    def bare(self, element: Mapping[str, Any]) -> Mapping[str, Any]:
        """An element without Weir's own mark."""
        return {name: value for name, value in element.items() if name != MARK}

    def own(self, text: str, markers: Mapping[str, Any], *, role: str) -> Raw:
        return write_value(
            {
                "role": "system" if role == "system" else "user",
                "content": content_with(text, markers),
            }
        )

    def extended(self, raw: Raw, text: str) -> Raw:
        value = first_object(raw)
        content = value.get("content")
        if isinstance(content, list):
            value["content"] = [*content, {"type": self.text_type, "text": text}]
        else:
            value["content"] = f"{content or ''}\n\n{text}"
        return like(raw, write_value(value))

    def joined(self, before: Raw, after: Raw) -> Raw | None:
        """Two user messages as one; None where they are from two people, or are in one turn anyway.

        Two texts make one text: some providers refuse a list of parts.
        """
        first = self._without_id(first_object(before))
        second = self._without_id(first_object(after))
        if first.get("name") != second.get("name"):
            return None
        one = first.get("content")
        other = second.get("content")
        if isinstance(one, str) and isinstance(other, str):
            return like(before, write_value({**second, **first, "content": f"{one}\n\n{other}"}))
        parts = [*self._parts(one), *self._parts(other)]
        return like(before, write_value({**second, **first, "content": parts}))

    def _parts(self, content: object) -> list[object]:
        if isinstance(content, list):
            return content
        return [{"type": self.text_type, "text": content}] if content else []

    @staticmethod
    def _without_id(message: Mapping[str, Any]) -> dict[str, Any]:
        """A message that is not what its id names any more."""
        return {name: value for name, value in message.items() if name != "id"}

    def marked(self, raw: Raw, marker: Mapping[str, Any]) -> Raw | None:
        return marked_message(raw, marker)

    def compose(self, request: "ClientRequest", segments: Sequence[Raw]) -> dict[str, bytes]:
        new: dict[str, bytes] = {}
        if segments and isinstance(segments[0], SystemField) and self.system is not None:
            if request.messages is None or segments[0] is not request.messages.head[0]:
                new[self.system] = bytes(split_object(segments[0])["content"])
            segments = segments[1:]
        return new | {self.array: array_of(self.elements(request, segments))}

    def elements(self, request: "ClientRequest", segments: Sequence[Raw]) -> Sequence[Raw]:
        return segments

    def stored(self, raw: Raw) -> bytes:
        return bytes(raw)

    # Requests to a model, and its answers

    def question(self, effect: Summarize, limit: LimitField) -> dict[str, object]:
        """The fields of a request for a summary, but its model."""
        asked: dict[str, object] = {
            "messages": [
                {"role": "system", "content": effect.system},
                {"role": "user", "content": effect.prompt},
            ],
            **_limit(effect.max_tokens, limit),
            "stream": False,
        }
        if limit == "max_tokens":
            asked["temperature"] = 0
        if effect.schema:
            described = {"name": SCHEMA_NAME, "strict": True, "schema": dict(effect.schema)}
            asked["response_format"] = {"type": "json_schema", "json_schema": described}
        return asked

    def completion(self, value: Any) -> Any:
        return value

    def matters(self, name: bytes, data: bytes) -> bool:
        """Whether an event has to be read in an answer that has said something; may be called for
        whole ones at once.

        Then both are their bytes.
        """
        return ERROR in name or _MATTERS.search(data) is not None

    def chunk(self, value: Any) -> Any:
        return value

    def error_body(self, error: ProxyError) -> bytes:
        return error.body()

    def error_event(self, error: ProxyError, answer: str | None = None) -> bytes:
        return error.event()


def _limit(most: int, field: LimitField) -> dict[str, object]:
    """OpenAI's reasoning models refuse ``max_tokens`` and any temperature but their own, and count
    what they think in ``max_completion_tokens`` (API reference, chat completions): so the limit has
    room for that on top.
    """
    return {field: most if field == "max_tokens" else most + REASONING_ROOM}


CHAT = Codec()


class Beginning(NamedTuple):
    """What a body began with: ``size`` bytes up to the end of an element of its array, and their
    hash.

    The array begins at ``start``; ``words`` are those of its codec's that occur in it.
    """

    size: int
    digest: bytes
    start: int
    words: frozenset[re.Pattern[bytes]]


class ClientRequest(msgspec.Struct, frozen=True):
    """One request as it came: ``fields`` are raw slices of ``body``, ``messages`` the segments of
    its history.

    ``messages`` is None where the request has no array there; such a request is relayed untouched.
    ``max_tokens`` is the most that the answer may take, as the field ``limit`` says.
    """

    body: bytes
    fields: Mapping[str, Raw]
    messages: "Segments | None"
    model: str
    stream: bool
    max_tokens: int | None
    limit: str = "max_tokens"
    codec: Codec = CHAT

    def value(self, name: str) -> Any:
        raw = self.fields.get(name)
        return None if raw is None else read_value(raw)

    def view(self, index: int) -> Mapping[str, Any]:
        return self.codec.view((self.messages or ())[index])


parse_chat = CHAT.parse


class Segments(Sequence[Raw]):
    """The history's segments as slices, split when they are first needed: most were seen before.

    ``head`` are segments in fields of their own, before those of the array; ``known`` are elements
    that the array only names, by their ids. ``words`` are those of its codec's that occur before
    its ``rest``.
    """

    def __init__(
        self,
        raw: Raw,
        codec: Codec = CHAT,
        head: Sequence[Raw] = (),
        known: Mapping[str, Raw] = NOTHING,
        *,
        rest: Raw | None = None,
        words: Collection[re.Pattern[bytes]] = (),
    ) -> None:
        self.raw = memoryview(raw)
        self.head = head
        self.known = known
        self._rest = raw if rest is None else rest
        self._mentioned = dict.fromkeys(words, True)
        self._codec = codec
        self._items: Sequence[Raw] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Not of the view: CPython up to 3.12 crashes where it collects a view in a cycle whose
        # buffer is exported.
        return Segments, (PickleBuffer(self.raw.obj), self._codec, self.head, self.known)

    def __len__(self) -> int:
        return len(self._split())

    def __bool__(self) -> bool:
        return len(self.raw) > len(b"[  ]") or len(self._split()) > len(self.head)

    def mentions(self, word: re.Pattern[bytes]) -> bool:
        if word not in self._mentioned:
            self._mentioned[word] = word.search(self._rest) is not None
        return self._mentioned[word]

    @overload
    def __getitem__(self, index: int) -> Raw: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Raw]: ...
    def __getitem__(self, index: int | slice) -> Raw | Sequence[Raw]:
        return self._split()[index]

    def all(self) -> Sequence[Raw]:
        return self._split()[:]

    def after(self, size: int) -> Sequence[Raw]:
        """The segments that follow the first ``size`` bytes of the array, which end with a closed
        one.
        """
        rest = bytes(self.raw[size:]).lstrip()
        return self._segments(b"[" + rest[1:]) if rest[:1] == b"," else ()

    def _segments(self, array: bytes | memoryview) -> Sequence[Raw]:
        found = self._codec.segments(split_array(array) or ())
        known = self.known
        return [self._codec.resolved(raw, known) for raw in found] if known else found

    def _split(self) -> Sequence[Raw]:
        if self._items is None:
            self._items = [*self.head, *self._segments(self.raw)]
        return self._items


def misshapen(request: ClientRequest) -> str | None:
    """The first field of an element that has to be a word and is an object or an array, like
    ``messages[3].role``.

    None where there is none: what else is odd is the upstream's to judge.
    """
    elements = () if request.messages is None else split_array(request.messages.raw) or ()
    for index, raw in enumerate(elements):
        value = read_value(raw)
        if not isinstance(value, dict):
            continue
        place = f"{request.codec.array}[{index}]"
        for name in request.codec.words_of_element:
            if isinstance(value.get(name), dict | list):
                return f"{place}.{name}"
        content = value.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(part.get("type"), dict | list):
                return f"{place}.content[{number}].type"
    return None


def without_field(request: ClientRequest, name: str) -> ClientRequest:
    return request.codec.parse(
        object_of({key: raw for key, raw in request.fields.items() if key != name})
    )


def with_history(request: ClientRequest, history: bytes, opening: bytes) -> ClientRequest:
    codec = request.codec
    fields = {**split_object(opening), **request.fields}
    fields[codec.array] = array_of([part for part in (history, codec.added(fields)) if part])
    if codec.link in fields:
        fields |= {codec.link: codec.unlinked or b""}
    return codec.parse(object_of({name: raw for name, raw in fields.items() if raw}))


def opening_of(request: ClientRequest) -> bytes:
    return object_of(
        {
            name: request.fields[name]
            for name in request.codec.created_with
            if name in request.fields
        }
    )


def object_of(fields: Mapping[str, Raw]) -> bytes:
    return (
        b"{" + b",".join(write_value(key) + b":" + bytes(raw) for key, raw in fields.items()) + b"}"
    )


def array_of(items: Sequence[Raw]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def message_of(role: str, content: bytes) -> bytes:
    return b'{"role":"' + role.encode() + b'","content":' + content + b"}"


def objects_in(raw: Raw) -> list[dict[str, Any]]:
    return dicts_in(read_value(b"[" + raw + b"]"))


def first_object(raw: Raw) -> dict[str, Any]:
    return next(iter(objects_in(raw)), {})


def run_as_json(raw: Raw) -> bytes:
    elements = elements_of(raw)
    return bytes(raw) if len(elements) == 1 else array_of(elements)


def definitions(request: ClientRequest, field: str) -> Sequence[Raw]:
    raw = request.fields.get(field)
    return () if raw is None else split_array(raw) or ()


def tool_name(definition: object) -> str:
    name = _described(definition).get("name")
    return name if isinstance(name, str) else ""


def tool_description(definition: object) -> str:
    text = _described(definition).get("description")
    return text if isinstance(text, str) else ""


_WRITTEN_BY_THE_CLIENT = frozenset({None, "function", "custom"})


def _described(definition: object) -> Mapping[str, Any]:
    if not isinstance(definition, dict):
        return {}
    inner = definition.get("function") or definition.get("custom")
    if isinstance(inner, dict):
        return inner
    return definition if definition.get("type") in _WRITTEN_BY_THE_CLIENT else {}


def tool_definitions(request: ClientRequest) -> dict[str, list[Raw]]:
    found: dict[str, list[Raw]] = {}
    for field in request.codec.tool_fields:
        for raw in definitions(request, field):
            if name := tool_name(read_value(raw)):
                found.setdefault(name, []).append(raw)
    return found


def chosen_tools(request: ClientRequest) -> frozenset[str]:
    waiting: list[Any] = [
        request.value(field)
        for field in ("tool_choice", "function_call")
        if field in request.fields
    ]
    found = set[str]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return frozenset(found)


def with_fields(body: bytes, **values: object) -> bytes:
    return replace_fields(body, split_object(body), {k: write_value(v) for k, v in values.items()})
