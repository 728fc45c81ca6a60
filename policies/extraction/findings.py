"""Tool results in few words: their leaves, one finding, and the placeholder that stands where a result was."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from policies.extraction.identifiers import WEIGHTS, Kind, classify, scan
from policies.tokens import TokenCounter

MAX_LEAVES = 3_000
LONGEST_ARGUMENT = 60
_LOOSE = " \n,;:-\u2013\u2014([…"
_VALUE_ONLY = frozenset({Kind.CODE, Kind.URL, Kind.HOST, Kind.EMAIL, Kind.PATH, Kind.SYMBOL})
_SPEAKS_FOR_ITSELF = frozenset({Kind.URL, Kind.EMAIL, Kind.PATH})
_PLAIN_KEY = re.compile(
    r"(?:^|_)(?:id|ids|number|no|name|key|code|url|path|file|email|date|title|sku|ref)s?$", re.IGNORECASE
)
_STAMP_KEY = re.compile(
    r"(?:created|updated|modified|timestamp|accessed|etag|hash|checksum|version|zip|postal|postcode)", re.IGNORECASE
)
_PAIRS = (("origin", "destination"), ("from", "to"), ("source", "target"), ("start", "end"), ("old", "new"))
_ENUMERATED = re.compile(r"[a-z]+(?:_[a-z]+)*")
ERROR = re.compile(
    r"\b(?:\w{0,40}(?:Error|Exception)\b|error\b|failed\b|failure\b|fatal\b|denied\b|not found\b|invalid\b|traceback\b|"
    r"cannot\b|unable to\b|refused\b|timed? ?out\b|panic\b|exit (?:code|status) [1-9])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a JSON document: the list or object it stands in, its record there, its key and itself."""

    section: str
    record: int
    key: str
    value: str
    kind: Kind
    weight: float

    @property
    def label(self) -> str:
        """The key in words; empty where the value says itself what it is."""
        if not self.key or self.kind in _SPEAKS_FOR_ITSELF:
            return ""
        if self.kind in _VALUE_ONLY and _PLAIN_KEY.search(self.key) and "_" in self.value:
            return ""
        if self.value.lower().startswith(self.key.lower()) or (self.kind is Kind.DATE and self.key == "date"):
            return ""
        return self.key.replace("_", " ")

    @property
    def text(self) -> str:
        """The value with its label, or alone where the value says itself what it is."""
        label = "" if self.kind in _VALUE_ONLY and self.section else self.label
        return f"{label} {self.value}" if label else self.value


def parse(text: str) -> object | None:
    """The JSON object or array that ``text`` is, None for anything else."""
    stripped = text.strip()
    if stripped[:1] not in "{[" or len(stripped) < 2:
        return None
    try:
        value: object = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def leaves(document: object) -> tuple[Leaf, ...]:
    """The leaves of a JSON document in order, records numbered, at most :data:`MAX_LEAVES` of them."""
    found: list[Leaf] = []
    records = iter(range(1_000_000))
    for leaf in _walk(document, section="", key="", record=next(records), records=records, depth=0):
        found.append(leaf)
        if len(found) >= MAX_LEAVES:
            break
    return tuple(found)


def _walk(node: object, *, section: str, key: str, record: int, records: Iterator[int], depth: int) -> Iterator[Leaf]:
    if depth > 30 or node is None or node == "":
        return
    if isinstance(node, dict):
        yield from _walk_object(node, section=section, record=record, records=records, depth=depth)
    elif isinstance(node, list):
        for item in node:
            inner = next(records) if isinstance(item, dict | list) else record
            yield from _walk(item, section=key or section, key=key, record=inner, records=records, depth=depth + 1)
    else:
        yield _leaf(node, section=section, key=key, record=record)


def _walk_object(
    node: dict[str, object], *, section: str, record: int, records: Iterator[int], depth: int
) -> Iterator[Leaf]:
    joined = set[str]()
    if isinstance(node.get("first_name"), str) and isinstance(node.get("last_name"), str):
        joined |= {"first_name", "last_name"}
        yield Leaf(section, record, "", f"{node['first_name']} {node['last_name']}", Kind.NAME, WEIGHTS[Kind.NAME])
    for first, second in _PAIRS:
        one, other = node.get(first), node.get(second)
        if isinstance(one, str) and isinstance(other, str) and 0 < len(one) <= 24 and 0 < len(other) <= 24:
            joined |= {first, second}
            yield Leaf(section, record, "", f"{one}-{other}", Kind.NAME, WEIGHTS[Kind.NAME])
    for key, value in node.items():
        if key in joined:
            continue
        if isinstance(value, dict | list):
            inner, name = next(records), key
            if isinstance(value, dict) and classify(key) in _VALUE_ONLY and any(c.isdigit() for c in key):
                yield _leaf(key, section=section, key="", record=inner)
                name = section
            yield from _walk(value, section=name, key=name, record=inner, records=records, depth=depth + 1)
        else:
            yield from _walk(value, section=section, key=key, record=record, records=records, depth=depth + 1)


def _leaf(value: object, *, section: str, key: str, record: int) -> Leaf:
    if isinstance(value, bool):
        return Leaf(section, record, key, "yes" if value else "no", Kind.WORD, 0.08)
    text = shorten(" ".join(str(value)[:600].split()), 240)
    if isinstance(value, int | float):
        kind = Kind.CODE if len(text) >= 6 and "." not in text else Kind.NUMBER
    else:
        kind = classify(text)
    weight = WEIGHTS[kind]
    if _STAMP_KEY.search(key):
        weight *= 0.3
    elif kind is Kind.WORD and ERROR.search(f"{key} {text}"):
        weight = 0.7
    elif kind is Kind.DATE and key not in {"date", "", "dob"} and len(text) > 10:
        weight *= 0.5
    elif kind is Kind.NUMBER and text in {"0", "1"}:
        weight *= 0.4
    elif kind is Kind.SYMBOL and _ENUMERATED.fullmatch(text):
        weight *= 0.3
    return Leaf(section, record, key, text, kind, weight)


_CODE = re.compile(
    r"(?:\A(?![\s\W]*\").*[;{(\[]|\A[\s})\];,]+|=>.*)\s*\Z|\A\W*(?:try|else|finally|except|catch)\s*[:{(]"
    r"|\A\W*(?:return|throw|raise|catch|except|if|elif|while|switch|def|class|function|async|await|const|let|var"
    r"|export|public|private|static|func|fn|assert|yield)\b(?=[^:]*[({;=]|[^:]*:\s*\Z)"
    r"|\A\W*(?:throw|raise|return)\s+[\w.]+;?\s*\Z|\A\W*except\s[\w\s.]+:\s*\Z"
    r"|\A\W*(?:from\s+\S+\s+import\b|import\s.*(?:from\s|;\s*\Z|\sas\s))"
    r"|\A\s*[-+]?\s*(?:#|//|/\*|<!--|@@)|\A\s*[\w.]+(?:\[[^\]]*\])? [-+*/|&]?= .*[(;]"
)
_REPORTED = re.compile(
    r"\b\w{0,40}(?:Error|Exception|Errno)\b[^(]{0,20}: |\b(?:error|fatal)(?:\[\w+\]| \w{2,8})?: "
    r"|\b\d+ (?:failed|errors?)\b|^\s*(?:FAIL|FAILED|ERROR|E )\b"
)
AN_ERROR = 0.9
LAST_LINES = 6
_NAMES = frozenset({Kind.SYMBOL, Kind.PATH, Kind.URL, Kind.CODE})
_VERDICT = re.compile(
    r"\b\d[\d,.]*\s*(?:%|tests?|passed|failed|skipped|errors?|warnings?|files?|rows?|matches|results?|total|in total)\b"
    r"|\b(?:total|summary|passed|succeeded|success(?:ful(?:ly)?)?|completed?|done|ok|exit(?:ed)?|result)\b",
    re.IGNORECASE,
)


def is_code(line: str) -> bool:
    """Whether a line reads as source text rather than as what a program reports of itself."""
    return bool(_CODE.search(line)) and not _REPORTED.search(line)


def informative_lines(text: str, *, limit: int = 400) -> tuple[tuple[str, float], ...]:
    """The lines of a plain result that say something, each with its weight: errors first in weight, then literals."""
    found: list[tuple[str, float]] = []
    for line in text.splitlines()[:4_000]:
        line = shorten(" ".join(line[:2_000].split()), 240)
        if len(line) < 2:
            continue
        if ERROR.search(line) and not is_code(line):
            found.append((line, AN_ERROR))
        elif len(found) < limit and any(c.isalnum() for c in line):
            literal = max((WEIGHTS[m.kind] for m in scan(line)), default=0.1)
            found.append((line, 0.5 * literal))
    return tuple(found)


def key_argument(arguments: str) -> str:
    """The argument values that tell a call from its siblings, at most two, at most 60 characters."""
    document = parse(arguments)
    found = leaves(document) if document is not None else ()
    ranked = sorted(range(len(found)), key=lambda i: (-found[i].weight, i))[:2]
    values = [found[i].value for i in sorted(ranked)]
    text = ", ".join(shorten(v, 48) for v in values) or " ".join(arguments[:400].split())
    if len(text) <= LONGEST_ARGUMENT or len(values) < 2:
        return shorten(text, LONGEST_ARGUMENT)
    return shorten(values[sorted(ranked).index(ranked[0])], LONGEST_ARGUMENT)


def shorten(text: str, longest: int) -> str:
    """``text`` in at most so many characters, cut between words.

    Of one word that is longer, a path keeps its last parts and anything else its two ends, the cut marked.
    """
    if len(text) <= longest:
        return text
    at = _edge(text, longest - 1)
    if at > longest // 3:
        return f"{text[:at].rstrip(_LOOSE)}…"
    part = text.find("/", len(text) - longest + 1)
    if 0 < part < len(text) - 1:
        return f"…{text[part:]}"
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def _edge(text: str, at: int) -> int:
    """The last place up to ``at`` where no word, path or number is cut; 0 where there is none."""
    if at >= len(text) or text[at].isspace():
        return min(at, len(text))
    return max(text.rfind(" ", 0, at), text.rfind("\n", 0, at), 0)


def clip(text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    """The longest head of ``text`` within ``max_tokens`` that ends between words, an ellipsis where it was cut.

    Empty where not even the first word fits.
    """
    if max_tokens <= 0:
        return ""
    if len(text) <= max_tokens * 16 and counter.count(text) <= max_tokens:
        return text
    low, high = 0, min(len(text), max_tokens * 16)
    while low < high:
        middle = (low + high + 1) // 2
        if counter.count(_ended(text, middle)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return _ended(text, low)


def _ended(text: str, at: int) -> str:
    kept = text[: _edge(text, at)].rstrip(_LOOSE)
    return f"{kept}…" if kept else ""


def finding(text: str, *, tool: str = "", arguments: str = "", max_tokens: int, counter: TokenCounter) -> str:
    """One line of at most ``max_tokens`` with what the result tells most; what the call already says is left out."""
    known = f"{tool} {arguments}"
    document = parse(text)
    if document is None:
        return _said_in_text(text, known=known, max_tokens=max_tokens, counter=counter)
    found = [leaf for leaf in leaves(document) if leaf.value not in known]
    if not found:
        return clip("empty" if not document else "as asked", max_tokens=max_tokens, counter=counter)
    chosen: set[int] = set()
    used = 0
    seen: set[str] = set()
    for i in sorted(range(len(found)), key=lambda i: (-found[i].weight / (2 + len(found[i].text) / 3) ** 0.5, i)):
        cost = counter.count(f" {found[i].text},")
        if found[i].value in seen or used + cost > max_tokens:
            continue
        seen.add(found[i].value)
        chosen.add(i)
        used += cost
        if max_tokens - used < 3:
            break
    line = ", ".join(found[i].text for i in sorted(chosen))
    return clip(line or found[0].text, max_tokens=max_tokens, counter=counter)


def _said_in_text(text: str, *, known: str, max_tokens: int, counter: TokenCounter) -> str:
    """Of a plain text its error, else its verdict, of source text the names in it, else its most telling line."""
    ranked = informative_lines(text, limit=200)
    if not ranked:
        return ""
    best = max(range(len(ranked)), key=lambda i: (ranked[i][1], -i))
    if ranked[best][1] >= AN_ERROR:
        return clip(ranked[best][0], max_tokens=max_tokens, counter=counter)
    verdict = [line for line, _ in ranked[-LAST_LINES:] if _VERDICT.search(line) and not is_code(line)]
    if verdict:
        return clip(verdict[-1], max_tokens=max_tokens, counter=counter)
    if sum(is_code(line) for line, _ in ranked) * 3 >= len(ranked) > 2:
        names = dict.fromkeys(m.value for m in scan(text[:20_000]) if m.kind in _NAMES and m.value not in known)
        return _joined(names, max_tokens=max_tokens, counter=counter) or ranked[best][0]
    return clip(ranked[best][0], max_tokens=max_tokens, counter=counter)


def _joined(values: Iterable[str], *, max_tokens: int, counter: TokenCounter) -> str:
    """As many of ``values`` as fit, in order."""
    chosen: list[str] = []
    for value in values:
        max_tokens -= counter.count(f" {value},")
        if max_tokens < 0:
            break
        chosen.append(value)
    return ", ".join(chosen)


def placeholder(text: str, *, tool: str, arguments: str, ref: str, max_tokens: int = 50, counter: TokenCounter) -> str:
    """What stands in place of a removed result: tool, key argument, what it found, and where the full text is."""
    name = re.sub(r"\s+", " ", tool)[:64] or "tool"
    argument = _harmless(key_argument(arguments))

    def line(called: str, found: str) -> str:
        said = f": {found}" if found else ""
        return f"[weir: result of {called} removed{said}. Archived as {ref}]"

    for called in dict.fromkeys((f"{name}({argument})", f"{name}({shorten(argument, 24)})", name)):
        room = max_tokens - counter.count(line(called, "")) - 2
        if room < 0:
            continue
        found = _harmless(finding(text, tool=tool, arguments=arguments, max_tokens=room, counter=counter))
        while found and counter.count(line(called, found.rstrip("."))) > max_tokens:
            room -= 1
            found = clip(found, max_tokens=room, counter=counter)
        return line(called, found.rstrip("."))
    return clip(f"[weir: {name} removed, archived as {ref}]", max_tokens=max_tokens, counter=counter)


def _harmless(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace("\n", " ")
