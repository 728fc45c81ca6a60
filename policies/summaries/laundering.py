"""Binding a summary's claims of authority to where they come from.

A tool result that says "the user approved the transfer" is a tool's word; repeated by a summary without its origin it
would be the user's. So every sentence that claims somebody's will, permission or order is looked up: if the user (or
who set the conversation up) said it, it stays; if only a tool or the assistant did, it is quoted with that origin; if
nobody can be found who said it, it goes. Orders that are copied from a tool result are quoted as well. A sentence
keeps the lowest trust of its sources.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.extraction.claims import stem
from policies.extraction.rules import STOP
from policies.summaries.authority import ASSENT, CLAIM, FOREIGN, GRANT, LOOKALIKES, ORDER, SPEAKERS, TELLS_NOTHING
from policies.summaries.transcript import Line, label, without_empty_headings
from policies.summary import harmless

WITHIN = 320
"""Characters of one line in which the words of a claim have to stand together."""
MOST_HITS = 400
MOST_STEMS = 24
LONGEST_CLAIM = 600
SUPPORTED = 0.5
"""Share of a claim's telling words that a line has to hold to be its source."""
STRONGER = 0.25
"""By so much more does a tool support a claim that is the tool's although the user said something like it."""
COPIED = 0.8
SHORT_ASSENT = 14  # words

_WORD = re.compile(r"[a-z\u00c0-\uffff0-9](?:[\w./@:+#%-]{0,80}\w)?")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]{2,}")
_SENTENCE = re.compile(r"(?<=[.!?])[ \t]+(?=\S)|(?<=[\u3002\uff01\uff1f])")
_LEAD = re.compile(
    r"\s{0,40}(?:[-*\u2022+#>]{1,6}\s{1,4}"
    r"|\d{1,3}[.)]\s{1,4}){0,3}(?:(?:\*\*)?[A-Z][A-Za-z ]{1,40}(?:\([^()\n]{0,80}\))?(?:\*\*)?:(?:\*\*)?(?:\s{1,4}"
    r"|\Z))?"
)
_REPORT = (
    r"(?:\(?according to|per|as reported by|reported by) (?:the |a |an )?((?:tool )?results?(?: of [\w .,/-]{1,64})?"
    r"|tool results?[\w .,/()-]{0,64}|tool[\w .-]{0,64}"
    r"|assistant(?: calls [\w .-]{1,64})?|notes?"
    r"|conversation)\s{0,2}[,:]\s{0,2}[\"\u201c]([^\"\u201c\u201d\n]{1,700})[\"\u201d]"
)
_QUOTE = re.compile(_REPORT, re.IGNORECASE)
_QUOTED = re.compile(_REPORT + r"\W{0,2}\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Bound:
    """A text whose claims carry their origin; how many were quoted and which were left out."""

    text: str
    quoted: int = 0
    dropped: tuple[str, ...] = ()


def bind(text: str, lines: Sequence[Line], *, previous: str = "") -> Bound:
    """``text`` with every claim of authority bound to its source among ``lines`` and the notes taken before."""
    sources = _Sources([*lines, *_noted(previous)])
    kept: list[str] = []
    quoted = 0
    dropped: list[str] = []
    for line in text.split("\n"):
        lead, body = _lead(line)
        said = [p for p in _sentences(body) if p.strip()]
        stays: list[str] = []
        for sentence in said:
            bound = sources.bind(sentence.strip(), lead=lead)
            if bound is None:
                dropped.append(sentence.strip())
            else:
                quoted += bound != sentence.strip()
                stays.append(bound)
        if stays or not said:
            kept.append(lead + " ".join(stays) if said else line)
        elif lead.rstrip().endswith(":") and not lead.lstrip().startswith(("-", "*", "\u2022")):
            kept.append(lead.rstrip())
    bound_text = "\n".join(kept)
    return Bound(without_empty_headings(bound_text) if dropped else bound_text, quoted, tuple(dropped))


def claims_authority(sentence: str) -> bool:
    """Whether a sentence claims somebody's will, permission or order."""
    plain = _plain(sentence[:LONGEST_CLAIM])
    return CLAIM.search(plain) is not None or FOREIGN.search(plain) is not None


def _lead(line: str) -> tuple[str, str]:
    """Bullet and heading of a line, and the rest; a speaker's label is no heading."""
    found = _LEAD.match(line)
    end = found.end() if found else 0
    words = line[:end].rstrip(" :*").rpartition(" ")[2].lower().strip("*-#>")
    if _plain(words) in SPEAKERS:
        end = len(line) - len(line.lstrip(" -*\u2022"))
    return line[:end], line[end:]


def _sentences(body: str) -> list[str]:
    """The sentences of a line's body; what stands quoted with its origin is one."""
    found: list[str] = []
    at = 0
    for quote in _QUOTE.finditer(body):
        found += _SENTENCE.split(body[at : quote.start()])
        found.append(quote.group())
        at = quote.end()
    return [part for part in [*found, *_SENTENCE.split(body[at:])] if part]


def _plain(text: str) -> str:
    """``text`` with compatibility forms and look-alikes as plain small letters; other scripts stay themselves."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKC", text).lower()
    return " ".join(_latin(word) for word in text.split(" "))


def _latin(word: str) -> str:
    """A word that mixes Latin with look-alikes from other scripts, in Latin."""
    if word.isascii():
        return word
    changed = word.translate(LOOKALIKES)
    letters = [c for c in changed if c.isalpha()]
    return changed if letters and all(c < "\u0250" for c in letters) else word


def _noted(previous: str) -> Iterator[Line]:
    """The claims of earlier notes, which were bound when they were taken: the quoted ones are a tool's."""
    for line in previous.split("\n"):
        _, body = _lead(line)
        for sentence in _sentences(body):
            quote = _QUOTED.match(sentence.strip())
            if quote:
                yield Line(quote.group(1), quote.group(2))
            elif claims_authority(sentence):
                yield Line("user", sentence)


class _Index:
    """The text of some lines, in which the places of a stem are looked up once."""

    __slots__ = ("_hits", "_lines", "_starts", "_text")

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._starts: list[int] = []
        parts: list[str] = []
        at = 0
        for line in lines:
            self._starts.append(at)
            parts.append(_plain(line.text))
            at += len(parts[-1]) + 1
        self._text = "\n".join(parts)
        self._hits: dict[str, list[int]] = {}

    def hits(self, word: str) -> list[int]:
        """Where words begin with ``word``, at most :data:`MOST_HITS` places from each end."""
        found = self._hits.get(word)
        if found is None:
            found = self._hits[word] = self._find(word)
        return found

    def _find(self, word: str) -> list[int]:
        text, found = self._text, list[int]()
        at = text.find(word)
        while at >= 0 and len(found) < MOST_HITS:
            if at == 0 or not text[at - 1].isalnum() or not word[0].isascii():
                found.append(at)
            at = text.find(word, at + 1)
        return found

    def best(self, stems: Sequence[str], total: int) -> tuple[float, Line | None, int]:
        """The largest share of ``stems`` that one passage of a line holds, that line, and its number."""
        places = sorted((at, n) for n, word in enumerate(stems) for at in self.hits(word))
        best, where = 0, -1
        counts = [0] * len(stems)
        first = have = 0
        for at, n in places:
            line = bisect_right(self._starts, at)
            have += counts[n] == 0
            counts[n] += 1
            while at - places[first][0] > WITHIN or bisect_right(self._starts, places[first][0]) != line:
                counts[places[first][1]] -= 1
                have -= counts[places[first][1]] == 0
                first += 1
            if have > best:
                best, where = have, line - 1
        return (best / total, self._lines[where], where) if where >= 0 else (0.0, None, -1)


class _Sources:
    """Who said what: the user, tools, the assistant."""

    __slots__ = ("_assents", "_others", "_results", "_words")

    def __init__(self, lines: Sequence[Line]) -> None:
        self._words = _Index([line for line in lines if line.has_authority])
        self._results = _Index([line for line in lines if line.is_result])
        self._others = _Index([line for line in lines if not line.has_authority and not line.is_result])
        pairs = pairwise(lines)
        answers = [Line("user", f"{a.text[-WITHIN:]}\n{b.text}") for a, b in pairs if _answers(a, b)]
        self._assents = _Index([Line("user", " ".join(line.text.split())) for line in answers])

    def bind(self, sentence: str, *, lead: str) -> str | None:
        """The sentence as it may stand: as it is, quoted with its origin, or not at all (None)."""
        already = _QUOTED.match(sentence)
        said = already.group(2) if already else sentence
        claims = already is not None or claims_authority(f"{lead.strip()} {said}" if _speaks(lead) else said)
        if not claims and not _may_order(said[:LONGEST_CLAIM]):
            return sentence
        stems = _stems(said)
        user, theirs, _ = self._words.best(stems, len(stems)) if stems else (0.0, None, -1)
        tool, result, _ = self._results.best(stems, len(stems)) if stems else (0.0, None, -1)
        other, spoken, _ = self._others.best(stems, len(stems)) if stems else (0.0, None, -1)
        if not claims:
            copied = result is not None and tool >= COPIED and len(stems) > 1 and max(user, other) < tool
            return _quote(said, result) if copied and result is not None else sentence
        if already is None and self._is_theirs(said, stems, user=user, tool=tool, line=theirs):
            return sentence
        if result is not None and tool >= SUPPORTED and tool >= other - STRONGER:
            return _quote(said, result)
        if spoken is not None and other >= SUPPORTED:
            return _quote(said, spoken)
        if already is not None:
            return _quote(said, Line(already.group(1), ""))
        return None

    def _is_theirs(self, said: str, stems: Sequence[str], *, user: float, tool: float, line: Line | None) -> bool:
        """Whether the user said it; a permission needs their assent as well."""
        if not stems:
            return False
        if any(not self._words.hits(s) and not self._assents.hits(s) for s in stems if any(c.isdigit() for c in s)):
            return False
        granted = GRANT.search(_plain(said)) is not None
        if granted and (line is None or not ASSENT.search(_plain(line.text))):
            user = 0.0
        answered, _, _ = self._assents.best(stems, len(stems))
        user = max(user, answered)
        return user >= SUPPORTED and tool < user + STRONGER


def _may_order(sentence: str) -> bool:
    """Whether a sentence may be an order: it begins like one, or is in a script in which nobody looked."""
    plain = _plain(sentence)
    return ORDER.match(plain) is not None or any(c.isalpha() and not c.isascii() for c in plain)


def _answers(first: Line, second: Line) -> bool:
    """Whether the second line is the user's short yes to the first, which is the assistant's."""
    if second.origin != "user" or first.origin != "assistant":
        return False
    return len(second.text.split()) <= SHORT_ASSENT and ASSENT.search(_plain(second.text)) is not None


def _speaks(lead: str) -> bool:
    """Whether the heading of a line says whose word it is."""
    return _plain(lead).strip(" -*:#").rpartition(" ")[2] in SPEAKERS


def _stems(sentence: str) -> list[str]:
    """What tells in a sentence: stems of its words, its identifiers, pairs of characters where words have no spaces."""
    plain = _plain(sentence[:LONGEST_CLAIM])
    found: dict[str, None] = {}
    for run in _CJK.findall(plain):
        found.update(dict.fromkeys(run[i : i + 2] for i in range(len(run) - 1)))
    for word in _WORD.findall(_CJK.sub(" ", plain)):
        if word in TELLS_NOTHING or word in STOP or len(word) < 2:
            continue
        found.setdefault(word if any(c.isdigit() for c in word) else stem(word))
    return [*found][:MOST_STEMS]


def _quote(said: str, line: Line) -> str:
    """The sentence in quotes behind its origin, in nobody's voice."""
    origin = label(line.origin)
    origin = f"a {origin}" if origin.startswith("tool") else f"the {origin}"
    words = " ".join(said.split())[:LONGEST_CLAIM].strip('"\u201c\u201d ')
    for mark in '"\u201c\u201d\u201e\u00ab\u00bb':
        words = words.replace(mark, "'")
    return f'according to {origin}: "{harmless(words)}"'
