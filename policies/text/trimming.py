"""Leaving fields out of a JSON document without touching the rest: spacing, order and spelling of numbers stay."""

import json
import re
from collections.abc import Collection

from policies.text.segments import parse

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s"{}\[\],:]+')


def without_fields(text: str, names: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """``text`` without the fields of these names, at any depth, and which of them there were, in order of appearance.

    What is no JSON object or array, is broken, or is nested too deeply to be read comes back as it is.
    """
    if not any(name in text for name in names) and not ("\\" in text and names):  # a key may be spelled with escapes
        return text, ()
    if parse(text) is None:
        return text, ()
    pruned = _Pruned(text, frozenset(names))
    return pruned.text(), tuple(pruned.found)


class _Pruned:
    """One pass over the tokens of a document that is known to be valid."""

    def __init__(self, text: str, names: frozenset[str]) -> None:
        self._text = text
        self._names = names
        self._parts: list[str] = []
        self._from = 0  # what is not in the parts yet begins here
        self._stack: list[bool | None] = []  # None in a list; in an object whether it has a field that stays
        self._depth: int | None = None  # where the field stands that is being left out
        self.found: dict[str, None] = {}

    def text(self) -> str:
        """The document without the fields."""
        key_next, comma = False, 0
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
                key_next, comma = self._stack[-1] is not None, match.start()
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
        """Go over a token of a field that is left out; at what follows the field go on with the rest."""
        if lexeme in ",}]" and len(self._stack) == self._depth:
            self._depth = None
            self._from = end if lexeme == "," and not self._stack[-1] else start
        elif lexeme in "{[":
            self._stack.append(None)
        elif lexeme in "}]":
            self._stack.pop()
