"""Which results the model used: whose identifiers come back in what it says and does later.

An identifier is a path, a symbol, a URL, an id, a number or a quoted string. One that the model knew before
it saw the result (from the system text, the user, or its own call's arguments) is no evidence, nor are the
whole numbers from 0 to 10. Paths are compared by their ends, so that a listing's ``client.ts`` is used by
``read src/api/client.ts``.

Only what assistant messages say is analysed; results are merely looked through for those identifiers. The
time is linear in the length of the texts, because a use counts for the newest :data:`HOLDERS` results that
hold the identifier (ours).
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from policies.identifiers import Kind, classify
from policies.messages import Body, ToolCall, Transcript
from policies.scoring.blocks import step_numbers

HOLDERS = 8
LONGEST_PHRASE = 80
SHORTEST_PHRASE = 4
MAX_VALUES = 2_000
TRIVIAL_UP_TO = 10

_TOKEN = re.compile(r"https?://[^\s\"'<>`)\]}\\]{3,300}|\w[\w./@#+-]{0,200}")
_QUOTED = re.compile(r'"([^"\n]*)"|`([^`\n]*)`')
_ESCAPE = re.compile(r'\\{1,8}[nrt"]')
_WHOLE_NUMBER = re.compile(r"\d{1,40}")
_ORDINAL = re.compile(r"\d{1,3}(?:st|nd|rd|th|s)", re.IGNORECASE)
_DOTTED = re.compile(r"\w{2,40}(?:\.\w{3,40}){1,6}")
_PLAIN_PAIR = re.compile(r"[a-z]+/[a-z]+", re.IGNORECASE)
_TRAILING = "./@#+-"
_EVIDENCE = frozenset(
    {
        Kind.URL,
        Kind.EMAIL,
        Kind.PATH,
        Kind.CODE,
        Kind.DATE,
        Kind.TIME,
        Kind.AMOUNT,
        Kind.QUANTITY,
        Kind.NUMBER,
        Kind.SYMBOL,
    }
)


@dataclass(frozen=True, slots=True)
class References:
    """Who used a result: the newest message that did, its step (see ``step_numbers``), and how many did.

    ``index`` and ``step`` are None where nothing did.
    """

    index: int | None = None
    step: int | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Used:
    """Identifiers that assistant messages use: whole ones, the ends of paths among them, and quoted phrases."""

    whole: frozenset[str]
    by_end: Mapping[str, tuple[str, ...]]
    phrases: frozenset[str]


def last_references(transcript: Transcript, calls: Mapping[int, ToolCall]) -> dict[int, References]:
    """For every tool result, by index, who used it; ``calls`` are the calls that results answer, by index."""
    messages = transcript.messages
    bodies = [transcript.read(i) for i in range(len(messages))]
    uses = {
        i: (_identifiers(body), _phrases_used(body))
        for i, (message, body) in enumerate(zip(messages, bodies, strict=True))
        if message.role == "assistant"
    }
    used = _index(uses.values())
    steps = step_numbers(messages)
    found = {i: References() for i, message in enumerate(messages) if message.is_result}
    holders: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=HOLDERS))
    known: set[str] = set()
    for i, message in enumerate(messages):
        if message.is_result:
            call = calls.get(i)
            own = _held(call.arguments, used) if call is not None else frozenset()
            for name in _held(bodies[i].text, used) - known - own:
                holders[name].append(i)
        elif message.role == "assistant":
            sources = {holder for name in frozenset().union(*uses[i]) for holder in holders.get(name, ())}
            for holder in sources:
                found[holder] = References(i, steps[i], found[holder].count + 1)
        else:
            known |= _held(bodies[i].text, used)
    return found


def _index(uses: Iterable[tuple[frozenset[str], frozenset[str]]]) -> _Used:
    whole: set[str] = set()
    phrases: set[str] = set()
    for names, quoted in uses:
        whole |= names
        phrases |= quoted
    by_end: defaultdict[str, list[str]] = defaultdict(list)
    for name in whole:
        for end in _ends(name):
            if _is_identifier(end):
                by_end[end].append(name)
    return _Used(frozenset(whole), {end: tuple(names) for end, names in by_end.items()}, frozenset(phrases))


def _held(text: str, used: _Used) -> frozenset[str]:
    """Which of the used identifiers stand in ``text``."""
    if not used.whole and not used.phrases:
        return frozenset()
    text = _plain(text)
    tokens = _tokens(text)
    held = used.whole & tokens
    for end in used.by_end.keys() & tokens:
        held |= frozenset(used.by_end[end])
    held |= used.whole.intersection(end for token in tokens if "/" in token for end in _ends(token))
    if used.phrases:
        held |= used.phrases.intersection(" ".join((a or b).split()) for a, b in _QUOTED.findall(text))
    return held


def _identifiers(body: Body) -> frozenset[str]:
    """The identifiers in the text and the arguments of an assistant message."""
    prose = {t for t in _tokens(_plain(body.text)) if not _PLAIN_PAIR.fullmatch(t)}
    stated = {t for value in _argument_values(body) for t in _tokens(_plain(value))}
    return frozenset(t for t in prose | stated if _is_identifier(t))


def _phrases_used(body: Body) -> frozenset[str]:
    """The quoted strings in the text of an assistant message, and the values of its arguments that have blanks."""
    quoted = (" ".join((a or b).split()) for a, b in _QUOTED.findall(_plain(body.text)))
    values = (" ".join(v.split()) for v in _argument_values(body) if len(v) <= 2 * LONGEST_PHRASE)
    spoken = (*quoted, *(v for v in values if " " in v))
    return frozenset(p for p in spoken if SHORTEST_PHRASE <= len(p) <= LONGEST_PHRASE)


def _argument_values(body: Body) -> Iterator[str]:
    """The values in the arguments of every call, without their keys; arguments that are no JSON as they stand."""
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


def _tokens(text: str) -> set[str]:
    return {token.rstrip(_TRAILING) for token in _TOKEN.findall(text)}


def _plain(text: str) -> str:
    """``text`` without the escapes of line ends, tabs and quotes that stand in JSON within text."""
    return _ESCAPE.sub(" ", text) if "\\" in text else text


def _ends(path: str) -> Iterator[str]:
    """The shorter ends of a path: ``b/c.py`` and ``c.py`` for ``a/b/c.py``; nothing for a URL."""
    if "://" in path:
        return
    at = path.find("/")
    while at >= 0:
        yield path[at + 1 :]
        at = path.find("/", at + 1)


def _is_identifier(token: str) -> bool:
    """Whether a word says by its shape that it names one thing; plain words and small numbers do not."""
    if len(token) < 2 or (token.isalpha() and (token.islower() or token.istitle())):
        return False
    if _WHOLE_NUMBER.fullmatch(token):
        return int(token) > TRIVIAL_UP_TO
    if _ORDINAL.fullmatch(token):
        return False
    return classify(token) in _EVIDENCE or _DOTTED.fullmatch(token) is not None
