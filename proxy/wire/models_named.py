"""The model that a request's body names, where it decides who may send it and where it goes.

What is judged must be what the upstream reads, and readers differ: of a key that stands twice some take the first and
some the last, Go's encoding/json takes ``Model`` for ``model``, and every parser of forms is lenient in its own way.
So a body that could be read in two ways is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from proxy.errors import InvalidRequest, UnsupportedEncoding
from proxy.wire.raw import Raw, has_repeated_keys, read_value, replace_fields, split_object, write_value

Headers = Sequence[tuple[bytes, bytes]]

MODEL = "model"
_NAMING = re.compile(r".*(?:models?|model_list|fallbacks?|deployments?|deployment_(?:id|name))", re.DOTALL)
"""How gateways call a field for another model: OpenRouter's ``models``, LiteLLM's ``context_window_fallbacks`` and
``deployment_id``, Bifrost's ``fallbacks``, Vercel's ``providerOptions.gateway.models``, a tool's ``model``."""
_SAID = frozenset(
    {
        *("messages", "input", "prompt", "instructions", "system", "documents", "metadata", "prediction", "query"),
        *("text", "response_format", "function", "functions", "custom", "parameters", "schema", "json_schema"),
        *("input_schema", "output_schema", "guided_json", "structured_outputs", "format", "properties", "description"),
    }
)
"""What is said to the model, and schemas: there a model is spoken of and not asked for."""
FORM = b"multipart/form-data"
URL_FORM = b"application/x-www-form-urlencoded"
PLAIN = frozenset({b"", b"identity"})

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;\s*boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;\s*charset=\"?utf-8\"?\s*)?",
    re.IGNORECASE,
)
_OTHER_CHARSET = re.compile(rb"charset[*0-9\s]*=\s*(?!\"?utf-?8\"?\s*(?:;|$))", re.IGNORECASE)
_DISPOSITION = re.compile(
    rb"form-data; *name=(?:\"([^\"\\\r\n]+)\"|([0-9A-Za-z_.\[\]-]+))"
    rb"(; *filename\*?=(?:\"[^\"\r\n]*\"|[^\s\";]+))*",
    re.IGNORECASE,
)


def model_in_body(headers: Headers, body: bytes) -> str:
    """The one model that a JSON object or a form names, empty where it names none.

    Raises InvalidRequest (UnsupportedEncoding where it is compressed) for what cannot be read, or in two ways.
    """
    kind = _kind_of(headers)
    if kind.startswith(FORM):
        return _model_in_form(body, _boundary_of(kind))
    return model_in_object(body, split_object(body))


def model_in_object(body: bytes, fields: Mapping[str, Raw]) -> str:
    """The one model that a JSON object names, of which these are the fields; InvalidRequest for two of them."""
    _require_one([key for key in fields if key.casefold() == MODEL])
    if has_repeated_keys(body, fields):
        raise InvalidRequest("The request body has a key twice. Readers differ in which of them counts: send one.")
    raw = bytes(fields.get(MODEL, b"null"))
    value = "" if raw == b"null" else read_value(raw)
    if not isinstance(value, str):
        raise InvalidRequest("model must be a string.", param=MODEL)
    return value


class _Pairs(list[tuple[str, object]]):
    """An object as it was written, with every key that stands twice."""


def other_models(fields: Mapping[str, Raw]) -> Iterator[str]:
    """Every model that an object names beside ``model``, at any depth: to fall back to, or for a tool.

    Raises InvalidRequest where that cannot be told.
    """
    for name, raw in fields.items():
        if name != MODEL and name.casefold() not in _SAID:
            yield from _named_in(_Pairs([(name, _pairs_of(raw))]))


def _pairs_of(raw: Raw) -> object:
    try:
        return json.loads(bytes(raw).decode(), object_pairs_hook=_Pairs, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request cannot be read to its end: its models have to be known here.") from None


def _named_in(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, _Pairs):
            waiting += each if isinstance(each, list) else ()
            continue
        for key, inner in each:
            if _names_a_model(key):
                yield from _names_of(key, inner)
            if key.casefold() not in _SAID:
                waiting.append(inner)


def _names_of(field: str, value: object) -> Iterator[str]:
    for each in value if isinstance(value, list) and not isinstance(value, _Pairs) else (value,):
        if isinstance(each, str):
            yield each
        elif isinstance(each, list) and not (isinstance(each, _Pairs) and any(_names_a_model(key) for key, _ in each)):
            text = f"This key may use some models only, and {field[:80]} names them in an unknown way."
            raise InvalidRequest(text, param=field[:80])


def _names_a_model(key: str) -> bool:
    # Go's encoding/json takes Models for models, and a long s for an s.
    return _NAMING.fullmatch(key.casefold()) is not None


def with_model(headers: Headers, body: bytes, model: str) -> bytes:
    """The same body naming this model; a form that names none yet."""
    kind = _kind_of(headers)
    if kind.startswith(FORM):
        field = b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode()
        return b"--" + _boundary_of(kind) + b"\r\n" + field + b"\r\n" + body
    return replace_fields(body, split_object(body), {MODEL: write_value(model)})


def is_form(headers: Headers) -> bool:
    """Whether the body is a form with parts."""
    return _kind_of(headers).startswith(FORM)


def require_json(headers: Headers) -> None:
    """Nothing, or InvalidRequest for a body that its headers call anything but JSON in UTF-8."""
    if is_form(headers):
        raise InvalidRequest("Send the request body as JSON, with Content-Type: application/json.")


def _kind_of(headers: Headers) -> bytes:
    """The content type in lower case up to its parameters' values; refused where it, or an encoding, hides the body."""
    kinds = [value.strip() for name, value in headers if name == b"content-type"]
    if any(value.strip().lower() not in PLAIN for name, value in headers if name == b"content-encoding"):
        raise UnsupportedEncoding("Send the request body without Content-Encoding: its model has to be read here.")
    if len(kinds) > 1 or any(kind.lower().startswith(URL_FORM) or _OTHER_CHARSET.search(kind) for kind in kinds):
        raise InvalidRequest(
            "Send the request body as JSON in UTF-8 or multipart/form-data: its model has to be read here."
        )
    kind = kinds[0] if kinds else b""
    return FORM + kind[len(FORM) :] if kind.lower().startswith(FORM) else kind


def _boundary_of(kind: bytes) -> bytes:
    found = _BOUNDARY.fullmatch(kind)
    if found is None:
        raise InvalidRequest("The form's boundary cannot be read.")
    return found.group(2)


def _model_in_form(body: bytes, boundary: bytes) -> str:
    """The value of the one part that is called ``model``; everything that parsers read differently is refused."""
    mark = b"--" + boundary
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    before, parts, after = pieces[0], pieces[1:-1], pieces[-1]
    if before or after not in (b"--", b"--\r\n") or body.count(mark) != len(pieces) - 1:
        raise InvalidRequest("The form cannot be read: its parts do not follow one another as they should.")
    models: list[bytes] = []
    names: list[str] = []
    for part in parts:
        name, value = _field(part)
        if name.casefold() != MODEL and any(_names_a_model(word) for word in re.split(r"[\[\].]", name)):
            raise InvalidRequest(f"A form may not have a field {name[:80]}: its model has to be read here.")
        if name.casefold() == MODEL:
            names.append(name)
            models.append(value)
    _require_one(names)
    if models == [b""]:
        raise InvalidRequest("model is empty.", param=MODEL)
    try:
        return models[0].decode() if models else ""
    except UnicodeDecodeError:
        raise InvalidRequest("model must be a string.", param=MODEL) from None


def _field(part: bytes) -> tuple[str, bytes]:
    """Name and value of a part; InvalidRequest unless its head is one that all parsers read alike."""
    head, blank, value = part.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    fields = [line.partition(b":") for line in lines[1:]]
    named = [value.strip() for name, _, value in fields if name.lower() == b"content-disposition"]
    known = {b"content-disposition", b"content-type", b"content-length"}
    odd = not blank or lines[0] or b"\n" in head.replace(b"\r\n", b"") or b"\0" in head
    found = _DISPOSITION.fullmatch(named[0]) if len(named) == 1 else None
    if odd or found is None or any(not colon or name.lower() not in known for name, colon, _ in fields):
        raise InvalidRequest("The form cannot be read: a part has another head than browsers and SDKs write.")
    return (found.group(1) or found.group(2)).decode("utf-8", "replace"), value


def _require_one(names: Sequence[str]) -> None:
    if list(names) not in ([], [MODEL]):
        said = " and ".join(names)
        raise InvalidRequest(f"The request names its model twice, or oddly ({said[:80]}): send one model.", param=MODEL)
