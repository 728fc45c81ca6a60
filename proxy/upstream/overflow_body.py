"""Error bodies taken apart: JSON, JSON in a string, arrays, SSE lines, SDK dumps, plain text."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from proxy.upstream.overflow_rules import CODE_IN_TEXT

HEAD: Final = 4096
"""Characters of one message that are looked at."""
MAX_TEXTS: Final = 6
MAX_NODES: Final = 64
MAX_DEPTH: Final = 12
LONGEST_PREFIX: Final = 512


_NARROW: Final = re.compile(r"(?<=\d)[\u00a0\u2009\u202f\u2019'_](?=\d{3}(?!\d))")
_COMMA: Final = re.compile(r"(?<=\d)(?<!\[\d),(?=\d{3}(?!\d))")
_DOT: Final = re.compile(r"(?<=\d)\.(?=\d{3} ?tokens?\b)")
_KILO: Final = re.compile(r"(?<![\w.])(\d{1,6})k(?= ?tokens?\b)")
_GLUED: Final = re.compile(r"(?<=\d)(?=tokens?\b)")
_URL: Final = re.compile(r"https?://[^\s\"'<>)]{1,400}")
_ESCAPE: Final = re.compile(r"\\{1,8}[nrt]")
_UNICODE: Final = re.compile(r"\\{1,8}u([0-9a-fA-F]{4})")
_QUOTES: Final = re.compile(r"[\\\"'`*\u2018\u2019\u201c\u201d]")
_SPACE: Final = re.compile(r"\s+")
_FULL_WIDTH: Final = {0x3000: " "} | {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}


@dataclass(frozen=True, slots=True)
class Report:
    """An error body taken apart: normalised messages, lower-case codes, numeric fields."""

    texts: tuple[str, ...] = ()
    codes: frozenset[str] = frozenset()
    fields: tuple[tuple[str, int], ...] = ()
    status: int | None = None


def plain(text: str) -> str:
    """The first ``HEAD`` characters in lower case, without quotes, links, separators of thousands and double spaces."""
    head = text[:HEAD]
    if "\\" in head:
        head = _ESCAPE.sub(" ", _UNICODE.sub(lambda match: chr(int(match.group(1), 16)), head))
    head = _NARROW.sub("", head)
    head = html.unescape(head) if "&" in head else head
    head = head.lower() if head.isascii() else head.translate(_FULL_WIDTH).lower()
    head = _SPACE.sub(" ", _QUOTES.sub("", _URL.sub(" ", head))).replace("(2013)", "")
    head = _GLUED.sub(" ", _DOT.sub("", _COMMA.sub("", head)))
    return _KILO.sub(r"\g<1>000", head).strip()


def decode(text: str) -> object:
    """The JSON value in ``text``, also behind a prefix such as ``400`` or ``data:``, else ``text`` itself."""
    if text.startswith(("data:", "event:", "id:", ":")):
        lines = [line[5:].strip() for line in text.splitlines()[:32] if line.startswith("data:")]
        parsed = [value for line in lines if isinstance(value := _decode_json(line), dict | list)]
        failing = [value for value in parsed if failure_in(value) is not None]
        return next(iter(failing or parsed), "\n".join(lines))
    value = _decode_json(text)
    return text if value is None else value


def _decode_json(text: str) -> object:
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    if not starts:
        return None
    for start in sorted(starts):
        if start > LONGEST_PREFIX or "{" in text[:start]:
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            return value if start == 0 else [{"message": text[:start]}, value]
    return None


def failure_in(value: object) -> object | None:
    """The error that a payload of a 200 response carries, None if it carries none."""
    if isinstance(value, list):
        inner = (failure_in(item) for item in value[:MAX_NODES])
        return next((item for item in inner if item is not None), None)
    if not isinstance(value, dict):
        return None
    response = value.get("response")
    if isinstance(response, dict) and response.get("error"):
        return response
    marked = value.get("type") == "error" or value.get("object") == "error" or value.get("success") is False
    if value.get("error") or value.get("errors") or marked:
        return value
    answered = any(key in value for key in ("choices", "content", "output", "delta", "usage", "object"))
    stated = any(isinstance(value.get(key), str) for key in ("message", "msg", "error_msg", "detail"))
    return value if stated and not answered and not str(value.get("type", "")).startswith("response.") else None


_CODE_KEYS: Final = frozenset(
    {"code", "type", "status", "reason", "error_code", "errorcode", "error_type", "errortype", "__type", "name"}
)
_TEXT_KEYS: Final = frozenset(
    {
        "message",
        "msg",
        "error",
        "error_msg",
        "errormsg",
        "error_message",
        "errormessage",
        "status_msg",
        "detail",
        "details",
        "title",
        "description",
        "raw",
        "body",
        "reason",
        "error_description",
        "cause",
    }
)
_NESTED_KEYS: Final = frozenset(
    {
        "error",
        "errors",
        "detail",
        "details",
        "metadata",
        "innererror",
        "inner_error",
        "response",
        "data",
        "cause",
        "raw",
        "base_resp",
    }
)
_STATUS_KEYS: Final = frozenset(
    {"code", "status", "http_status_code", "status_code", "statuscode", "http_status", "raw_status_code"}
)


@dataclass(slots=True)
class _Gathered:
    texts: list[str]
    codes: set[str]
    fields: dict[str, int]
    status: int | None = None
    nodes: int = 0


def take_apart(value: object) -> Report:
    """The messages, codes and numeric fields of an error body, whatever its envelope."""
    found = _Gathered([], set(), {})
    _walk(value, found, depth=0, nested=0)
    texts = tuple(dict.fromkeys(filter(None, (plain(text) for text in found.texts[:MAX_TEXTS]))))
    codes = {code.strip().lower() for code in found.codes}
    for text in texts:
        codes.update(match.group(1) for match in CODE_IN_TEXT.finditer(text))
    return Report(texts, frozenset(codes), tuple(found.fields.items()), found.status)


def _walk(value: object, found: _Gathered, *, depth: int, nested: int) -> None:
    found.nodes += 1
    if depth > MAX_DEPTH or found.nodes > MAX_NODES:
        return
    if isinstance(value, str):
        found.texts.append(value[:HEAD])
        inner = _decode_json(value) if nested < 3 and ("{" in value or "[" in value) else None
        if inner is not None:
            _walk(inner, found, depth=depth + 1, nested=nested + 1)
    elif isinstance(value, list):
        for item in value[:8]:
            _walk(item, found, depth=depth + 1, nested=nested)
    elif isinstance(value, dict):
        for key, item in _head(value):
            _walk_field(key.lower(), item, found, depth=depth, nested=nested)


def _head(value: dict[str, object]) -> Iterator[tuple[str, object]]:
    return (pair for pair, _ in zip(value.items(), range(MAX_NODES), strict=False))


def _walk_field(key: str, item: object, found: _Gathered, *, depth: int, nested: int) -> None:
    number = item if isinstance(item, int) and not isinstance(item, bool) else None
    if key in _CODE_KEYS and (number is not None or isinstance(item, str)):
        found.codes.add(str(item)[:64])
    if key in _STATUS_KEYS and found.status is None:
        digits = str(item) if number is not None or (isinstance(item, str) and len(item) == 3) else ""
        found.status = int(digits) if re.fullmatch(r"[45]\d\d", digits) else None
    if key in ("n_prompt_tokens", "n_ctx") and number is not None:
        found.fields[key] = number
    if (isinstance(item, str) and key in _TEXT_KEYS) or (isinstance(item, dict | list) and key in _NESTED_KEYS):
        _walk(item, found, depth=depth + 1, nested=nested)
