"""Which results can be spared: whose identifiers were not used again, and whose content others
nearly repeat.

An identifier is a path, a symbol, a URL, an id, a number or a quoted string. One that the model
knew before it saw the result (from the system text, the user, or its own call's arguments) is no
evidence, nor are the whole numbers from 0 to 10. Paths are compared by their ends, so that a
listing's ``client.ts`` is used by ``read src/api/client.ts``. The time is linear in the texts,
because a use counts for the newest :data:`HOLDERS` results that hold the identifier (ours).

Whether two texts are alike is decided elsewhere. A result is compared with at most
:data:`NEIGHBOURS` of the :data:`LOOK_BACK` results of the same tool before it, if the shorter has
at least half the length of the longer, and never more than :data:`MAX_PAIRS` pairs in all, the
newest first (all ours). Equal texts need no comparison.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.lines import in_one_line
from policies.messages import Body, ToolCall, Transcript, step_numbers
from policies.text.segments import is_identifier, parse

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
    """For every tool result, by index, who used it; ``calls`` are the calls that results answer, by
    index.
    """
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


def _uses(
    transcript: Transcript, bodies: Sequence[Body], heard: frozenset[str]
) -> dict[int, frozenset[str]]:
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
    return _Read(
        words, frozenset(end for word in words if "/" in word for end in _ends(word)), text
    )


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
    candidates = (
        w for w in prose | stated if w in heard or ("/" in w and not heard.isdisjoint(_ends(w)))
    )
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
        waiting = [document]
        left = MAX_VALUES
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


NEIGHBOURS = 4
LOOK_BACK = 8
MAX_PAIRS = 256
LENGTH_RATIO = 0.5

MAX_CHANGES = 6
MAX_VALUES_SHOWN = 4
MAX_NOTE = 300
_MAX_VALUE_LEN = 40
_MAX_NAME_LEN = 60
_MAX_FIELDS = 400
_MAX_PARSED = 100_000
_FIELD = re.compile(r"^[ \t]*([A-Za-z][\w .-]{0,39}?)[ \t]*[:=][ \t]*(\S.{0,400})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Output:
    index: int
    tool: str
    text: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Texts by message index; those that are ``equal``, and ``pairs`` to be compared by a model,
    the older one first.
    """

    texts: Mapping[int, str]
    equal: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Merge:
    index: int
    text: str
    earlier: tuple[int, ...]


def candidates(outputs: Sequence[Output]) -> Candidates:
    by_tool: defaultdict[str, list[Output]] = defaultdict(list)
    for output in sorted(outputs, key=lambda o: o.index):
        if output.text.strip():
            by_tool[output.tool].append(output)
    equal: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []
    for same in by_tool.values():
        last: dict[str, int] = {}
        for at, output in enumerate(same):
            if output.text in last:
                equal.append((last[output.text], output.index))
            last[output.text] = output.index
            pairs.extend(
                (other.index, output.index)
                for other in _neighbours(output, same[max(0, at - LOOK_BACK) : at])
            )
    pairs.sort(key=lambda p: (-p[1], -p[0]))
    texts = {output.index: output.text for output in outputs}
    return Candidates(texts, tuple(sorted(equal)), tuple(sorted(pairs[:MAX_PAIRS])))


def merge(
    found: Candidates, similarities: Mapping[tuple[int, int], float], *, threshold: float
) -> tuple[Merge, ...]:
    """By index: texts linked by a similarity above ``threshold``; in each set the latest stays.

    Links chain: a poll similar to the next one joins the last of the series, although the two may
    differ by then.
    """
    alike = [*found.equal, *(p for p in found.pairs if similarities.get(p, 0.0) > threshold)]
    sets = sorted(_joined(alike), key=lambda members: members[-1])
    return tuple(Merge(of[-1], merged_text([found.texts[i] for i in of]), of[:-1]) for of in sets)


def merged_text(texts: Sequence[str]) -> str:
    count = len(texts) - 1
    results = "1 earlier result" if count == 1 else f"{count} earlier results"
    changes = "; ".join(_changes(texts))
    if changes:
        how = f"; earlier: {_clipped(changes, MAX_NOTE)}"
    else:
        how = " with the same text" if len(set(texts)) == 1 else " differing in details"
    return f"{texts[-1]}\n[weir: stands for {results}{how}]"


def _neighbours(output: Output, before: Sequence[Output]) -> list[Output]:
    found: dict[str, Output] = {}
    for other in reversed(before):
        shorter, longer = sorted((len(other.text), len(output.text)))
        if other.text != output.text and shorter >= LENGTH_RATIO * longer:
            found.setdefault(other.text, other)
    return list(found.values())[:NEIGHBOURS]


def _joined(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The sets of what pairs link, each in order."""
    linked: dict[int, set[int]] = {}
    for one, other in pairs:
        smaller, larger = sorted(
            (linked.setdefault(one, {one}), linked.setdefault(other, {other})), key=len
        )
        if smaller is not larger:
            larger |= smaller
            linked |= dict.fromkeys(smaller, larger)
    return [
        tuple(sorted(members)) for members in {id(each): each for each in linked.values()}.values()
    ]


def _changes(texts: Sequence[str]) -> list[str]:
    values: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        for name, value in fields(text).items():
            if not values[name] or values[name][-1] != value:
                values[name].append(value)
    changed = [
        (len(seen), at, name) for at, (name, seen) in enumerate(values.items()) if len(seen) > 1
    ]
    return [f"{name} {_course(values[name])}" for _, _, name in sorted(changed)[:MAX_CHANGES]]


def _course(values: Sequence[str]) -> str:
    if len(values) > MAX_VALUES_SHOWN:
        values = (*values[: MAX_VALUES_SHOWN - 2], "…", values[-1])
    return " → ".join(values)


def fields(text: str) -> dict[str, str]:
    document = (parse(text) or None) if len(text.strip()) <= _MAX_PARSED else None
    if document is not None:
        return dict(_leaves(document))
    named = [
        (_named(m[1], _MAX_NAME_LEN), _named(m[2], _MAX_VALUE_LEN)) for m in _FIELD.finditer(text)
    ]
    if named:
        found: dict[str, str] = {}
        for name, value in named[:_MAX_FIELDS]:
            found.setdefault(name, value)
        return found
    lines = [line for line in text.splitlines() if line.strip()][:_MAX_FIELDS]
    return {f"line {n}": _named(line, _MAX_VALUE_LEN) for n, line in enumerate(lines, 1)}


def _leaves(document: object) -> Iterator[tuple[str, str]]:
    waiting: list[tuple[str, object]] = [("", document)]
    left = _MAX_FIELDS
    while waiting and left:
        left -= 1
        path, node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend((_below(path, key), inner) for key, inner in reversed(node.items()))
        elif isinstance(node, list):
            waiting.extend(
                (_below(path, str(n)), inner) for n, inner in reversed([*enumerate(node)])
            )
        else:
            value = node if isinstance(node, str) else json.dumps(node)
            yield _named(path, _MAX_NAME_LEN), _named(value, _MAX_VALUE_LEN)


def _below(path: str, key: str) -> str:
    return f"{path}.{key[:_MAX_NAME_LEN]}" if path else key[:_MAX_NAME_LEN]


def _named(text: str, longest: int) -> str:
    return _clipped(" ".join(in_one_line(text[: 4 * longest]).split()), longest)


def _clipped(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"
