"""Literals: words that name something letter by letter, whatever language stands around them."""

import re
from itertools import pairwise

from policies.text.segments import WORD, is_identifier

_CODE = re.compile(r"`([^`\n]{2,80})`")
_QUOTED = re.compile(r"[\"\u00ab\u201c\u201e\u300c][^\n]{2,80}[\"\u00bb\u201d\u201c\u300d]|\w\(\)")
_ROOTED = re.compile(r"(?<![\w/:.<])~?/\w[\w.@/-]*\w")
_DOTTED = re.compile(r"\w{2}\.\w")
LONG_NUMBER = 3
"""Digits from which a number names something in what a model says."""
SHORTEST = 4


def literals(text: str) -> tuple[str, ...]:
    """Identifiers, long numbers, names of files, names in code, each once and as it stands there."""
    found = dict.fromkeys(code.strip() for code in (*_CODE.findall(text), *_ROOTED.findall(text)))
    found.update(dict.fromkeys(word for word in WORD.findall(text) if is_literal(word)))
    return tuple(found)


def is_literal(word: str) -> bool:
    """Whether a word names something: by its digits, its joints, or a capital within it."""
    if sum(c.isdigit() for c in word) >= LONG_NUMBER:
        return True
    if len(word) < SHORTEST:
        return False
    if word.replace("/", "").isalpha() and "/" in word:
        return word.count("/") > 1 or not word.islower()
    return is_identifier(word) or _DOTTED.search(word) is not None or has_inner_capital(word)


def names_something(text: str) -> bool:
    """Whether a text has a literal, a digit, a quotation, or a name; True in scripts that have no capitals."""
    words = WORD.findall(text)
    if not any(c.islower() or c.isupper() for c in text):
        return bool(words)
    named = any(word[0].isupper() or any(c.isdigit() for c in word) for word in words[1:])
    return named or bool(literals(text)) or _QUOTED.search(text) is not None


def has_inner_capital(word: str) -> bool:
    """Whether a small letter comes before a capital, as in names of code."""
    return any(one.islower() and other.isupper() for one, other in pairwise(word))


def normal(text: str) -> str:
    """An entry as it is compared with another: small, single blanks, nothing at its end that ends a sentence."""
    return " ".join(text.lower().split()).rstrip(".!\u3002\uff01\u0964\u06d4")
