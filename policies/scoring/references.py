"""Which results the model used: whose identifiers come back in what it says and does later.

An identifier is a path, a symbol, a URL, an id, a number or a quoted string. One that the model knew before it saw the
result (from the system text, the user, or its own call's arguments) is no evidence, nor are the whole numbers from 0 to
10. Paths are compared by their ends, so that a listing's ``client.ts`` is used by ``read src/api/client.ts``. The time
is linear in the texts, because a use counts for the newest :data:`HOLDERS` results that hold the identifier (ours).
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.messages import Body, ToolCall, Transcript
from policies.text.segments import is_identifier
from policies.turns import step_numbers

HOLDERS = 8
MAX_PHRASE_LEN = 80
SHORTEST_PHRASE = 4
MAX_VALUES = 2_000
TRIVIAL_UP_TO = 10

_WORD = re.compile(r"https?://[^\s\"'<>`)\]}\\]{3,300}|\w[\w./@#+-]{0,200}")
_QUOTED = re.compile(r'"([^"\n]*)"|`([^`\n]*)`')
_ESCAPE = re.compile(r'\\{1,8}[nrt"]')
_WHOLE_NUMBER = re.compile(r"\d{1,40}")
_ORDINAL = re.compile(r"\d{1,3}(?:st|nd|rd|th|s)", re.IGNORECASE)
_DOTTED = re.compile(r"\w{2,40}(?:\.\w{2,40}){1,6}|\d{1,20}[.,]\d{1,20}")
_PLAIN_PAIR = re.compile(r"[a-z]+/[a-z]+", re.IGNORECASE)
_TRAILING = "./@#+-"
_MIXED_CASE = re.compile(r"[^\W\d_]*[a-z][A-Z]\w*")


@dataclass(frozen=True, slots=True)
class References:
    index: int | None = None
    step: int | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    words: frozenset[str]
    ends: frozenset[str]
    text: str


@dataclass(frozen=True, slots=True)
class _Used:
    whole: frozenset[str]
    by_end: Mapping[str, tuple[str, ...]]
    phrases: frozenset[str]


def last_references(transcript: Transcript, calls: Mapping[int, ToolCall]) -> dict[int, References]:
    """For every tool result, by index, who used it; ``calls`` are the calls that results answer, by index."""
    messages = transcript.messages
    bodies = [transcript.read(i) for i in range(len(messages))]
    results = {i: _read(bodies[i].text) for i, message in enumerate(messages) if message.is_result}
    heard = frozenset().union(*(r.words | r.ends for r in results.values()))
    uses = _uses(transcript, bodies, heard)
    used = _index(uses.values(), heard)
    steps = step_numbers(messages)
    found = {i: References() for i in results}
    holders: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=HOLDERS))
    known: set[str] = set()
    for i in range(len(messages)):
        if i in results:
            call = calls.get(i)
            own = _held(_read(call.arguments), used) if call is not None else frozenset()
            for name in _held(results[i], used) - known - own:
                holders[name].append(i)
        elif i in uses:
            for holder in {h for name in uses[i] for h in holders.get(name, ())}:
                found[holder] = References(i, steps[i], found[holder].count + 1)
        else:
            known |= _held(_read(bodies[i].text), used)
    return found


def _uses(transcript: Transcript, bodies: Sequence[Body], heard: frozenset[str]) -> dict[int, frozenset[str]]:
    if not heard:
        return {}
    return {
        i: _identifiers(body, heard) | _phrases_used(body)
        for i, (message, body) in enumerate(zip(transcript.messages, bodies, strict=True))
        if message.role == "assistant"
    }


def _index(uses: Iterable[frozenset[str]], heard: frozenset[str]) -> _Used:
    everything = frozenset().union(*uses)
    phrases = frozenset(name[1:-1] for name in everything if name.startswith('"'))
    whole = frozenset(name for name in everything if not name.startswith('"'))
    by_end: defaultdict[str, list[str]] = defaultdict(list)
    for name in whole:
        for end in _ends(name):
            if end in heard and _is_identifier(end):
                by_end[end].append(name)
    return _Used(whole, {end: tuple(names) for end, names in by_end.items()}, phrases)


def _read(text: str) -> _Read:
    text = _plain(text)
    words = frozenset(_words(text))
    return _Read(words, frozenset(end for word in words if "/" in word for end in _ends(word)), text)


def _held(read: _Read, used: _Used) -> frozenset[str]:
    held = (used.whole & read.words) | (used.whole & read.ends)
    for end in used.by_end.keys() & read.words:
        held |= frozenset(used.by_end[end])
    if used.phrases:
        held |= frozenset(f'"{p}"' for p in used.phrases.intersection(_quotes(read.text)))
    return held


def _identifiers(body: Body, heard: frozenset[str]) -> frozenset[str]:
    prose = {word for word in _words(_plain(body.text)) if not _PLAIN_PAIR.fullmatch(word)}
    stated = {word for value in _argument_values(body) for word in _words(_plain(value))}
    candidates = (w for w in prose | stated if w in heard or ("/" in w and not heard.isdisjoint(_ends(w))))
    return frozenset(w for w in candidates if _is_identifier(w))


def _phrases_used(body: Body) -> frozenset[str]:
    values = (" ".join(v.split()) for v in _argument_values(body) if len(v) <= 2 * MAX_PHRASE_LEN)
    spoken = (*_quotes(_plain(body.text)), *(v for v in values if " " in v))
    return frozenset(f'"{p}"' for p in spoken if SHORTEST_PHRASE <= len(p) <= MAX_PHRASE_LEN)


def _quotes(text: str) -> Iterator[str]:
    return (" ".join((double or back).split()) for double, back in _QUOTED.findall(text))


def _argument_values(body: Body) -> Iterator[str]:
    for call in body.calls:
        try:
            document: object = json.loads(call.arguments)
        except (ValueError, RecursionError):
            yield call.arguments
            continue
        waiting, left = [document], MAX_VALUES
        while waiting and left:
            node = waiting.pop()
            left -= 1
            if isinstance(node, dict):
                waiting.extend(node.values())
            elif isinstance(node, list):
                waiting.extend(node)
            elif isinstance(node, str | int | float) and not isinstance(node, bool):
                yield str(node)


def _words(text: str) -> set[str]:
    return {word.rstrip(_TRAILING) for word in _WORD.findall(text)}


def _plain(text: str) -> str:
    return _ESCAPE.sub(" ", text) if "\\" in text else text


def _ends(path: str) -> Iterator[str]:
    """The shorter ends of a path: ``b/c.py`` and ``c.py`` for ``a/b/c.py``; nothing for a URL."""
    if "://" in path:
        return
    at = path.find("/")
    while at >= 0:
        yield path[at + 1 :]
        at = path.find("/", at + 1)


def _is_identifier(word: str) -> bool:
    if len(word) < 2 or (word.isalpha() and (word.islower() or word.istitle())):
        return False
    if _WHOLE_NUMBER.fullmatch(word):
        return int(word) > TRIVIAL_UP_TO
    if _ORDINAL.fullmatch(word):
        return False
    return is_identifier(word) or any(p.fullmatch(word) for p in (_MIXED_CASE, _DOTTED))
