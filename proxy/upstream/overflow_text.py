"""Error bodies taken apart (JSON, JSON in a string, arrays, SSE lines, SDK dumps, plain text), and their numbers."""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from proxy.upstream.overflow_rules import CODE_IN_TEXT, N

HEAD = 4096
"""Characters of one message that are looked at."""
MAX_TEXTS = 6
MAX_NODES = 64
MAX_DEPTH = 12
MAX_PREFIX_LEN = 512
MAX_NUMBERS = 24

_NARROW = re.compile(r"(?<=\d)[\u00a0\u2009\u202f\u2019'_](?=\d{3}(?!\d))")
_COMMA = re.compile(r"(?<=\d)(?<!\[\d),(?=\d{3}(?!\d))")
_DOT = re.compile(r"(?<=\d)\.(?=\d{3} ?tokens?\b)")
_KILO = re.compile(r"(?<![\w.])(\d{1,6})k(?= ?tokens?\b)")
_GLUED = re.compile(r"(?<=\d)(?=tokens?\b)")
_URL = re.compile(r"https?://[^\s\"'<>)]{1,400}")
_ESCAPE = re.compile(r"\\{1,8}[nrt]")
_UNICODE = re.compile(r"\\{1,8}u([0-9a-fA-F]{4})")
_QUOTES = re.compile(r"[\\\"'`*\u2018\u2019\u201c\u201d]")
_SPACE = re.compile(r"\s+")
_FULL_WIDTH = {0x3000: " "} | {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}


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
    for start in sorted(at for at in (text.find("{"), text.find("[")) if at >= 0):
        if start > MAX_PREFIX_LEN or "{" in text[:start]:
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


_CODE_KEYS = frozenset(
    {"code", "type", "status", "reason", "error_code", "errorcode", "error_type", "errortype", "__type", "name"}
)
_TEXT_KEYS = frozenset(
    {
        *("message", "msg", "error", "error_msg", "errormsg", "error_message", "errormessage", "status_msg"),
        *("detail", "details", "title", "description", "raw", "body", "reason", "error_description", "cause"),
    }
)
_NESTED_KEYS = frozenset(
    {
        *("error", "errors", "detail", "details", "metadata", "innererror", "inner_error"),
        *("response", "data", "cause", "raw", "base_resp"),
    }
)
_STATUS_KEYS = frozenset(
    {"code", "status", "http_status_code", "status_code", "statuscode", "http_status", "raw_status_code"}
)


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error body taken apart: normalised messages, lower-case codes, numbers by field, a status if one is in it."""

    texts: tuple[str, ...] = ()
    codes: frozenset[str] = frozenset()
    numbers: Mapping[str, int] = field(default_factory=dict)
    status: int | None = None


def take_apart(value: object) -> ErrorReport:
    """The messages, codes and numeric fields of an error body, whatever its envelope."""
    found = _Gathered()
    found.walk(value, depth=0, nested=0)
    texts = tuple(dict.fromkeys(filter(None, (plain(text) for text in found.texts[:MAX_TEXTS]))))
    codes = {code.strip().lower() for code in found.codes}
    codes.update(match.group(1) for text in texts for match in CODE_IN_TEXT.finditer(text))
    return ErrorReport(texts, frozenset(codes), found.numbers, found.status)


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    nodes: int = 0

    def walk(self, value: object, *, depth: int, nested: int) -> None:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            return
        if isinstance(value, str):
            self.texts.append(value[:HEAD])
            inner = _decode_json(value) if nested < 3 and ("{" in value or "[" in value) else None
            if inner is not None:
                self.walk(inner, depth=depth + 1, nested=nested + 1)
        elif isinstance(value, list):
            for item in value[:8]:
                self.walk(item, depth=depth + 1, nested=nested)
        elif isinstance(value, dict):
            for name, item in islice(value.items(), MAX_NODES):
                key = name.lower()
                self._note(key, item)
                keys = _TEXT_KEYS if isinstance(item, str) else _NESTED_KEYS
                if isinstance(item, str | dict | list) and key in keys:
                    self.walk(item, depth=depth + 1, nested=nested)

    def _note(self, key: str, item: object) -> None:
        number = item if isinstance(item, int) and not isinstance(item, bool) else None
        if key in _CODE_KEYS and (number is not None or isinstance(item, str)):
            self.codes.add(str(item)[:64])
        if key in _STATUS_KEYS and self.status is None:
            digits = str(item) if number is not None or (isinstance(item, str) and len(item) == 3) else ""
            self.status = int(digits) if re.fullmatch(r"[45]\d\d", digits) else None
        if number is not None:
            self.numbers[key] = number


_SUM = re.compile(rf"({N}) ?\+ ?({N}) ?>=? ?({N})")
_PAIR = re.compile(rf"(?<![\d+-] )(?<!\d)({N})(?: tokens?)? ?>=? ?({N})(?!\d| ?[-+])")
_RATIO = re.compile(rf"\(({N}) ?/ ?({N}) tokens?\)")
_RANGE = re.compile(rf"input length should be \[\d{{1,3}}, ?({N})\]")
_NUMBER = re.compile(rf"(?<![\w.\-/])({N})(?![\w]|\.\d|%)")
_CUT = re.compile(r"[.;,!?。]| but | while | however ")

# Roles of a number, from the words after it and before it; ``part`` is one of a prompt that is given in pieces.
_AFTER = {
    role: re.compile(" ?(?:tokens? )?(?:" + words + ")")
    for role, words in {
        "part": r"in (?:the|your) (?:messages|prompt|input|functions|tools|tool)"
        r"|of (?:text|tool|image|audio|file)? ?input|from the input|(?:inputs?|prompt) tokens",
        "completion": r"(?:in|for) (?:the|your) (?:completion|output|response)"
        r"|max_(?:new_|completion_|output_)?tokens|(?:output|completion) tokens",
        "none": r"draft|bytes|char|pixel|[kmg]b\b|images?|seconds|ms\b|s\b|over the|above the|too ",
        "limit": r"maximum|max\b|limit\b|token limit|token context|available|allowed|supported|permitted",
        "total": r"requested|were requested|used\b|received",
    }.items()
}
_BEFORE = {
    role: re.compile(pattern)
    for role, pattern in {
        "limit": r"(?:max(?:imum)?(?!_(?:new_|completion_|output_)?tokens)|limit|allowed"
        r"|context (?:length|window|size|limit)|context ?(?=[:(])|n_ctx|at most|up to|cannot exceed|not exceed"
        r"|exceeds?|exceeded|less than|longer than|greater than|larger than|more than|<=?|>=?|window|budget|capacity"
        r"|supports|最大|上限|限制|不超过|不能超过|超过|超出|大于|窗口)"
        r"(?:[ _](?:input|prompt|context|sequence|seq|tokens?|length|len|number|of|allowed|total|models?|size|window"
        r"|is|was|the|to|count|only|limit|maximum|max|supported|permitted))*"
        r"(?:[上下文长度的模型输入为是数量窗口限制]{0,12})",
        "prompt": r"(?:number of tokens|token count|prompt|inputs?|messages|contains|contained|resulted in|n_keep|first"
        r"|conversation|history|request|has|have|given|provided|sent|supplied|actual|got|your"
        r"|输入|请求|实际|当前|提示词)"
        r"(?:[ _](?:input|prompt|tokens?|length|count|of|is|was|size|contains|has|are|too|long|number|at|least))*"
        r"(?:[长度的为是数量个共约达]{0,8})",
        "total": r"(?:input and (?:maximum )?output tokens|requested|received|total|sum|current length|used|总)"
        r"(?: (?:of|tokens|is|about|a|at|least))*",
        "completion": r"max_(?:new_|completion_|output_)?tokens(?: is too large)?|completion|output|generation",
        "none": r"\bby\b|upper bound for|\bid\b|error|code|status|http|query length|index|position",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one message states, in tokens; ``requested`` is prompt plus completion, else the total, else the prompt."""

    limit: int | None = None
    prompt: int | None = None
    completion: int | None = None
    requested: int | None = None

    @property
    def told(self) -> int:
        """How many of them were given."""
        return sum(n is not None for n in (self.limit, self.prompt, self.completion, self.requested))


def read_numbers(text: str) -> Numbers:
    """The numbers of a normalised message that speaks of an overflow, by the role that the words beside them give."""
    if "got -" in text:  # old vLLM prints the window less the prompt
        return Numbers()
    added = _SUM.search(text)
    if added:
        prompt, completion, limit = map(int, added.groups())
        return Numbers(limit, prompt, completion, prompt + completion)
    bounded = _RANGE.search(text)
    if bounded:
        return Numbers(int(bounded.group(1)))
    pair = _PAIR.search(text) or _RATIO.search(text)
    if pair and "max_tokens" not in text:
        prompt, limit = map(int, pair.groups())
        return Numbers(limit, prompt, None, prompt)
    return _by_role(text)


def _by_role(text: str) -> Numbers:
    roles: dict[str, list[int]] = {}
    last = 0
    for match in islice(_NUMBER.finditer(text), MAX_NUMBERS):
        role = _role(text[max(last, match.start() - 64) : match.start()], text[match.end() : match.end() + 40])
        last = match.end()
        number = int(match.group(1))
        if not (match.start() == 0 and 400 <= number < 600):  # a status
            roles.setdefault(role, []).append(number)
    limits, parts = roles.get("limit", []), roles.get("part", [])
    limit, prompt, completion, total = (
        next(iter(roles.get(role, ())), None) for role in ("limit", "prompt", "completion", "total")
    )
    if parts:
        prompt = sum(dict.fromkeys(parts))
    if limits and prompt is None and total is None and completion is None and max(limits) > min(limits):
        limit, prompt = min(limits), max(limits)
    if prompt is not None and completion is not None:
        return Numbers(limit, prompt, completion, prompt + completion)
    return Numbers(limit, prompt, completion, prompt if total is None else total)


def _role(before: str, after: str) -> str:
    if before.endswith("upper bound for "):
        return "none"
    for role, pattern in _AFTER.items():
        if pattern.match(after):
            return role
    tail = _CUT.split(before)[-1]
    best, reach = "none", -1
    for role, pattern in _BEFORE.items():
        end = max((m.end() for m in pattern.finditer(tail)), default=-1)
        if end > reach:
            best, reach = role, end
    return best
