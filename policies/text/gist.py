"""One message in few words, all of them its own: the replacement for its content.

:func:`without_fields` leaves fields out of a JSON document without touching the rest: spacing,
order and spelling of numbers stay.
"""

import json
import re
from collections.abc import Collection, Sequence

from policies.lines import in_one_line
from policies.text.choice import Item, Weights, choose, fitted, joined
from policies.text.segments import (
    Readings,
    Segment,
    Source,
    TextReading,
    error_lines,
    is_alone,
    is_identifier,
    parse,
    reports_error,
    structured,
    terms_of,
    without_line_numbers,
)
from policies.text.steps import outcome
from policies.tokens import TokenCounter, clip, shorten

MAX_ARGUMENT_LEN = 60
MAX_VALUE_LEN = 48
KEY_ARGUMENTS = 2
BETWEEN = 3
"""Tokens between the end that is reported and what else is shown."""
REPORTED = 6.0


def gist(
    text: str,
    *,
    role: str = "tool",
    known: str = "",
    max_tokens: int,
    counter: TokenCounter,
    whole: bool = False,
    between: str = "\n",
    readings: Readings | None = None,
) -> str:
    """The most informative segments of a text within ``max_tokens``, in their order, in addition to
    what is ``known``.

    ``whole`` requires every line that reports an error: empty where they do not fit. Where no
    segment fits, the beginning of the best.
    """
    if max_tokens <= 0:
        return ""
    text = without_line_numbers(text) if role == "tool" else text
    if whole and counter.count(between.join(error_lines(text))) > max_tokens:
        return ""
    items = _items((Readings() if readings is None else readings).of(Source(0, role, text)), role)
    weights = Weights([frozenset(item.segment.terms) for item in items])
    ranked = choose(items, 2 * max_tokens, weights=weights, shown=terms_of(known))
    if whole:
        ranked.sort(key=lambda group: not reports_error(items[group[0]].segment.text))
    found = fitted(
        ranked,
        lambda chosen: _shown(items, chosen, between),
        costs=[item.cost for item in items],
        max_tokens=max_tokens,
        counter=counter,
    )
    if found.text or not items:
        return found.text
    best = max(
        items, key=lambda item: item.factor * sum(map(weights.__getitem__, item.segment.terms))
    )
    return clip(best.segment.text, max_tokens=max_tokens, counter=counter)


def _items(reading: TextReading, role: str) -> list[Item]:
    segments = [s for s in reading.segments if s.terms]
    return [
        Item(
            source=0,
            place=place,
            segment=segment,
            factor=(
                REPORTED
                if role == "tool" and reports_error(f"{segment.key} {segment.text}")
                else 1.0
            )
            * (2.0 if is_alone(segment) else 1.0),
            cost=len(segment.text) / 4 + len(segment.key) / 8 + 1,
        )
        for place, segment in enumerate(segments)
    ]


def _shown(items: Sequence[Item], chosen: Sequence[int], between: str) -> str:
    return joined([items[n] for n in sorted(chosen)], gap=between)


def key_argument(arguments: str) -> str:
    document = parse(arguments)
    found = list(structured(document)) if document is not None else []
    ranked = sorted(range(len(found)), key=lambda i: (-_telling(found[i]), i))[:KEY_ARGUMENTS]
    values = [found[i].text for i in sorted(ranked)]
    text = ", ".join(shorten(" ".join(v.split()), MAX_VALUE_LEN) for v in values) or " ".join(
        arguments[:400].split()
    )
    if len(text) <= MAX_ARGUMENT_LEN or len(values) < KEY_ARGUMENTS:
        return shorten(text, MAX_ARGUMENT_LEN)
    return shorten(" ".join(found[ranked[0]].text.split()), MAX_ARGUMENT_LEN)


def _telling(pair: Segment) -> float:
    if any(is_identifier(term) for term in pair.terms):
        return 2.0
    return (
        1.0
        if pair.terms and not pair.text.isdigit() and pair.text not in {"true", "false"}
        else 0.0
    )


def placeholder(
    text: str,
    *,
    tool: str,
    arguments: str,
    ref: str,
    max_tokens: int = 50,
    counter: TokenCounter,
    readings: Readings | None = None,
) -> str:
    name = in_one_line(" ".join(tool.split()))[:64] or "tool"
    argument = in_one_line(key_argument(arguments))

    def line(called: str, found: str) -> str:
        said = f": {found}" if found else ""
        return f"[weir: result of {called} removed{said}. Archived as {ref}]"

    for called in dict.fromkeys((f"{name}({argument})", f"{name}({shorten(argument, 24)})", name)):
        room = max_tokens - counter.count(line(called, "")) - 2
        if room < 0:
            continue
        ended, found = outcome(text)
        left = room - counter.count(found) - (BETWEEN if ended else 0)
        if not ended or left > 0:
            known = f"{tool} {arguments} {found if ended else ''}"
            other = gist(
                text,
                known=known,
                max_tokens=left if ended else room,
                counter=counter,
                between=" … ",
                readings=readings,
            )
            found = in_one_line(
                " … ".join(part for part in (found if ended else "", other) if part)
            )
        while found and counter.count(line(called, found.rstrip("."))) > max_tokens:
            room -= 1
            found = clip(found, max_tokens=room, counter=counter)
        return line(called, found.rstrip("."))
    return clip(
        f"[weir: {name} removed, archived as {ref}]", max_tokens=max_tokens, counter=counter
    )


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s"{}\[\],:]+')


def without_fields(text: str, names: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """``text`` without the fields of these names, at any depth, and which of them there were, in
    order of appearance.

    What is no JSON object or array, is broken, or is nested too deeply to be read comes back as it
    is.
    """
    # a key may be spelled with escapes
    if not any(name in text for name in names) and not ("\\" in text and names):
        return text, ()
    if parse(text) is None:
        return text, ()
    pruned = _Pruned(text, frozenset(names))
    return pruned.text(), tuple(pruned.found)


class _Pruned:
    def __init__(self, text: str, names: frozenset[str]) -> None:
        self._text = text
        self._names = names
        self._parts: list[str] = []
        self._from = 0  # what is not in the parts yet begins here
        # None in a list; in an object whether it has a field that stays
        self._stack: list[bool | None] = []
        self._depth: int | None = None  # depth of the field that is being left out
        self.found: dict[str, None] = {}

    def text(self) -> str:
        key_next = False
        comma = 0
        for match in _TOKEN.finditer(self._text):
            lexeme = match.group()
            if self._depth is not None:
                self._skip(lexeme, match.start(), match.end())
                if self._depth is not None:
                    continue
            if lexeme in "{[":
                self._stack.append(False if lexeme == "{" else None)
                key_next = lexeme == "{"
            elif lexeme in "}]":
                self._stack.pop()
                key_next = False
            elif lexeme == ",":
                key_next = self._stack[-1] is not None
                comma = match.start()
            elif key_next:
                self._key(lexeme, match.start(), comma)
                key_next = False
        return "".join((*self._parts, self._text[self._from :]))

    def _key(self, lexeme: str, start: int, comma: int) -> None:
        name = json.loads(lexeme) if "\\" in lexeme else lexeme[1:-1]
        if name in self._names:
            self.found[name] = None
            self._parts.append(self._text[self._from : comma if self._stack[-1] else start])
            self._depth = len(self._stack)
        else:
            self._stack[-1] = True

    def _skip(self, lexeme: str, start: int, end: int) -> None:
        if lexeme in ",}]" and len(self._stack) == self._depth:
            self._depth = None
            self._from = end if lexeme == "," and not self._stack[-1] else start
        elif lexeme in "{[":
            self._stack.append(None)
        elif lexeme in "}]":
            self._stack.pop()
