"""Whether a reply can be used as a summary, and whether what it names was there.

A reply is refused with one code for each way in which replies are useless. Every pattern is bounded, and of a reply
only as much is read as an answer of the asked length can have.

Identifiers, numbers and names of a summary are looked up in the material, which may be a hundred times longer. What
is written another way (``1,200`` for ``1200``, ``17.5.2024`` for ``2024-05-17``, ``UTF-8`` for ``utf8``, the beginning
of a commit's hash) is not invented.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from policies.effects import Failed, Summary
from policies.summary.material import harmless
from policies.summary.prompts import Prompt
from policies.summary.proposal import HEADINGS, under_headings
from policies.text.output import reports_error
from policies.text.segments import WORD, is_identifier, sentences
from policies.tokens import TokenCounter

__all__ = ["declines", "grounded", "invented", "judge", "missing", "normal_text", "without_reasoning"]

SMALLER = 0.9
TOO_LONG = 1.5
MAX_TOKEN_LEN = 32
"""Characters; a text of more characters than this times its allowance is too long without being counted."""
ECHO_RUN = 200
DEFLATES = 10
"""A text that deflates to a tenth says the same over and over; of 900 real answers none came below a fifth."""
MAX_REPEATED = 4
"""Times that a sentence may stand; a text is refused of which such ones are most."""
UNREADABLE = 0.02
MAX_WORD_LEN = 400
BRIEF = 120
"""Tokens up to which a reply that opens like a provider's error is one."""

_I = r"i(?:['\u2019]m| am)"
_CAN = (
    r"(?:help|assist|do|provide|comply|summari[sz]e|continue|fulfil|create|process|access|share|discuss|support|engage"
    r"|complete|generate|see|read|give|write|produce|carry)"
)
_REFUSAL = re.compile(
    rf"\W{{0,3}}(?:{_I} (?:very |really |so )?(?:sorry|afraid)|sorry, |(?:unfortunately,? )?i (?:can(?:no|['\u2019])t"
    rf"|won['\u2019]t"
    rf"|could ?n[o'\u2019]t) {_CAN}|(?:unfortunately,? )?{_I} (?:unable|not able|not allowed|not comfortable)"
    r"|as an? (?:ai|large|language)\b|i (?:must|have to) (?:decline|refuse)|this (?:request|content) (?:violates"
    r"|was flagged)"
    r"|es tut mir leid|lo siento|je suis d[\u00e9e]sol[\u00e9e]|mi dispiace|desculpe|\u62b1\u6b49|\u5bf9\u4e0d\u8d77"
    r"|\u7533\u3057\u8a33|\u043a \u0441\u043e\u0436\u0430\u043b\u0435\u043d\u0438\u044e"
    r"|\u0438\u0437\u0432\u0438\u043d\u0438\u0442\u0435"
    r"|\uc8c4\uc1a1)",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"\W{0,4}(?:\"?error\"?\s{0,2}[:=]|error (?:code|\d{3})|(?:http|status)(?: status)?(?: code)?[ :]{1,3}[45]\d\d\b"
    r"|[45]\d\d "
    r"(?:bad|internal|too many|service|gateway|unauthori[sz]ed|forbidden|not found)|(?:internal server|api"
    r"|rate ?limit|upstream"
    r"|connection|authentication|gateway|provider|model|generation|summary|summari[sz]ation"
    r"|compaction)(?: \w{1,12}){0,2}"
    r" (?:error|exceeded|reached|timed out|timeout|failed|unavailable|overloaded)\b|request timed out"
    r"|too many requests|service"
    r" unavailable|bad gateway|context[ _]length[ _]exceeded|this model['\u2019]s maximum context"
    r"|the model is (?:currently )?overloaded"
    r"|invalid api key|insufficient_quota|you exceeded your|traceback \(most recent|something went wrong"
    r"|failed to (?:generate"
    r"|summari[sz]e|create|produce) )",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"\W{0,4}(?:(?:your |the |insert |conversation |brief ){0,3}summary (?:goes )?(?:here|unavailable|not available"
    r"|is not"
    r" available|placeholder)|insert (?:your |the |a )?(?:summary|text)|no summary|placeholder|lorem ipsum"
    r"|todo\b.{0,20}summar"
    r"|no response|no content|no output|undefined|null|nan)\W{0,6}(?:\Z|\n|available|generated|was |could |returned)",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"(?:(?:sure|certainly|of course|okay|ok|absolutely|here (?:is|are)|here['\u2019]s|below (?:is|are)"
    r"|the following)\b)"
    r"[^\n]{0,160}:[ \t*]{0,6}\n",
    re.IGNORECASE,
)
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|reasoning|analysis|scratchpad|reflection)>", re.IGNORECASE)
_FENCED = re.compile(r"```[a-zA-Z0-9_-]{0,20}[ \t]{0,20}\n")
_UNREADABLE = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ud800-\udfff]")
_EMPTY_VALUE = re.compile(
    r"[\s\W_]{0,20}(?:none|nothing|n/?a|tbd|unknown|not (?:mentioned|stated|applicable|specified|provided)"
    r"|to be filled)?[\s\W_]{0,20}\Z",
    re.IGNORECASE,
)
_NONE = re.compile(r"\W{0,3}(?:none|nothing|no notes?)\W{0,3}\Z", re.IGNORECASE)
_TITLES = re.compile(
    r"(?im)^[ \t#>*_-]{0,8}(?:"
    + "|".join(map(re.escape, HEADINGS.values()))
    + r"|done so far|decisions and why)\b[ \t*_]{0,4}(?:\([^()\n]{0,80}\))?[ \t*_]{0,4}(?::|$)"
)
_NUMBERING = "-*\u2022+#>0123456789.) \t"
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f](?=\s|\Z)|\n")


def judge(
    reply: object, *, material: str, prompt: Prompt, max_tokens: int, counter: TokenCounter, original: int | None = None
) -> tuple[str, str]:
    """The usable text of a reply and "", or "" and the code of why it is refused.

    ``original`` is how many tokens the summary replaces where that is not the material's number.
    """
    said, failure = _said(reply, (max_tokens * TOO_LONG + prompt.shortest) * MAX_TOKEN_LEN * 4)
    if failure:
        return "", failure
    assert isinstance(reply, Summary)  # noqa: S101 - what says something is one
    text = _unwrapped(harmless(said)).strip()
    if reply.finish_reason == "length" and not text.startswith("{"):
        text = _whole(text)
    written = "" if text.startswith("{") else text
    if prompt.schema:
        text = under_headings(text)
    if prompt.name == "notes" and _NONE.match(text):
        return "", "nothing"
    if _echoes(said, material):
        return "", "echo"
    size = counter.count(material) if original is None else original
    failure = _fault(text, size, material=material, shortest=prompt.shortest, max_tokens=max_tokens, counter=counter)
    failure = failure or ("loop" if _loops(written) else "")
    return ("", failure) if failure else (text, "")


def declines(text: str) -> bool:
    """Whether a reply opens as one that declines, or as the error of a provider: asking again may bring another."""
    said = without_reasoning(text)
    return bool(_REFUSAL.match(said) or _PLACEHOLDER.match(said) or (_ERROR.match(said) and len(said) < BRIEF * 4))


def without_reasoning(text: str) -> str:
    """``text`` without what stands in thinking tags; all before an end that has no beginning is thinking too."""
    kept: list[str] = []
    depth, at = 0, 0
    for tag in _THOUGHT.finditer(text):
        if tag.group(1):
            if depth == 0:
                kept.clear()
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                kept.append(text[at : tag.start()])
            depth += 1
        at = tag.end()
    if depth == 0:
        kept.append(text[at:])
    return "".join(kept).strip()


def _said(reply: object, most: float) -> tuple[str, str]:
    """What a reply of at most so many characters says, or the code of why that is nothing."""
    if isinstance(reply, Failed):
        return "", reply.reason or "failed"
    if not isinstance(reply, Summary):
        return "", "no_reply"
    if reply.tool_calls:
        return "", "tool_call"
    if len(reply.text) > most:
        return "", "too_long"
    said = without_reasoning(reply.text)
    if not said:
        return "", "reasoning_only" if reply.text.strip() else "empty"
    return said, "garbage" if _is_garbage(said) else ""


def _fault(text: str, size: int, *, material: str, shortest: int, max_tokens: int, counter: TokenCounter) -> str:
    """The code of why a text does not do for a summary of ``size`` tokens; empty for one that does."""
    told, tokens = _substance(text), counter.count(text)
    if not told:
        return "empty"
    if _REFUSAL.match(text):
        return "refusal"
    if _is_error(text, tokens, material=material):
        return "error_text"
    if min(tokens, counter.count(told)) < shortest:
        return "too_short"
    if _loops(text):
        return "loop"
    if tokens > max_tokens * TOO_LONG:
        return "too_long"
    return "not_smaller" if tokens >= size * SMALLER else ""


def _unwrapped(text: str) -> str:
    """``text`` without a preamble and without a code fence around the whole of it."""
    preamble = _PREAMBLE.match(text)
    if preamble:
        text = text[preamble.end() :]
    stripped = text.strip()
    fenced = _FENCED.match(stripped)
    if fenced and stripped.endswith("```") and stripped.count("```") == 2:
        return stripped[fenced.end() : -3]
    return text


def _whole(text: str) -> str:
    """``text`` up to its last complete sentence or line, as it was cut off; all of it where that is little."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends and ends[-1] * 2 > len(text) else text


def _substance(text: str) -> str:
    """What is said under the headings, without them and without words for nothing."""
    lines = (line.strip() for line in _TITLES.sub("", text).splitlines())
    return "\n".join(line for line in lines if not _EMPTY_VALUE.match(line))


def _is_garbage(text: str) -> bool:
    """Whether a text is not readable: replaced or control characters, or one endless word."""
    if len(_UNREADABLE.findall(text)) > len(text) * UNREADABLE:
        return True
    endless = sum(len(w) for w in text.split() if len(w) > MAX_WORD_LEN and w.isascii() and w[:1] not in "{[")
    return endless * 2 > len(text)


def _is_error(text: str, tokens: int, *, material: str) -> bool:
    """Whether a reply is an error of whoever made it, or stands for a summary; not if the material says it too."""
    if _PLACEHOLDER.match(text):
        return True
    found = _ERROR.match(text)
    return found is not None and tokens <= BRIEF and found.group().strip(' "{[').lower() not in material.lower()


def _echoes(text: str, material: str) -> bool:
    """Whether most of a reply is copied out of its input in long runs."""
    if len(text) < ECHO_RUN * 2:
        return False
    pieces = [text[i : i + ECHO_RUN] for i in range(0, len(text) - ECHO_RUN + 1, ECHO_RUN)]
    copied = sum(piece in material for piece in pieces)
    return copied * 2 > len(pieces)


def _loops(text: str) -> bool:
    """Whether a text repeats itself; a list of lines that differ in a number does not."""
    said = [s.lstrip(_NUMBERING) for line in text.splitlines() for s in sentences(line)]
    times = Counter(s for s in said if s)
    if 2 * sum(n for n in times.values() if n > MAX_REPEATED) > times.total():
        return True
    raw = text.encode(errors="replace")
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(deflate.compress(raw) + deflate.flush()) * DEFLATES <= len(raw)


MAX_LOOKED = 60
MAX_PATHS = 10
MAX_ERRORS = 3
ERRORS_WITHIN = 60_000
"""Characters at the end of the material in which errors are taken for open ones."""
MAX_OF_ERROR = 3
MIN_NUMBER_LEN = 2
"""Digits; a smaller number is counted, not copied."""
MIN_LOOSE_LEN = 3
MAX_IDENTIFIER_LEN = 200
INFLECTED = 3
"""Letters at the end of a name that may be another case's."""
MIN_NAME_LEN = 4
NAMES_ALL = 0.2
"""Share of words with a capital from which on a language writes other words than names with one."""
READ_FOR_CAPITALS = 20_000
_SEPARATED = re.compile(r"(?<=\d)[,\u2019'\u00a0\u202f](?=\d{3}(?!\d))")
_NOT_WORD = re.compile(r"[\W_]+")
_HEX = re.compile(r"[0-9a-f]{7,40}\Z")
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_DATE = re.compile(r"(\d{1,4})[-./](\d{1,2})[-./](\d{1,4})\Z")
_DOTTED = re.compile(r"\w{2,}\.\w{2,}")
_ALTERNATIVES = re.compile(r"[^\W\d_]+/[^\W\d_]+\Z")
_QUOTED = re.compile(
    r"[`\"\u201c\u00ab\u300c]([^`\"\u201c\u201d\u00ab\u00bb\u300c\u300d\n]{4,80})[`\"\u201d\u00bb\u300d]"
)
_PARTS = re.compile(r"[^/\\]+")
_HEADING = re.compile(r"(?:#{1,6} |\*\*)?[A-Z][\w ]{1,40}(?:\([^()\n]{0,80}\))?(?:\*\*)?:")
_BARE_HEADING = re.compile(_HEADING.pattern + r"[*\s]{0,6}\Z")
_PATH = re.compile(r"[^\s\"'`<>(){}\[\],;:=|*\\\u2039\u203a]{3,160}")
_STATUS = re.compile(r"\b(?:status|code|errno|port|exit|http)\W{1,3}(\d{3,5})\b", re.IGNORECASE)


class Mentions(NamedTuple):
    """What of the material a summary should name, and what of that it does not."""

    wanted: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of the wanted that is named, 1.0 where nothing is wanted."""
        return 1.0 - len(self.missing) / len(self.wanted) if self.wanted else 1.0


def normal_text(text: str) -> str:
    """``text`` as identifiers are compared: small letters, numbers without separators of thousands."""
    return _SEPARATED.sub("", text.lower())


class _Material:
    """The material of a look-up; the more costly form of it is made when it is first needed."""

    def __init__(self, text: str) -> None:
        self.text = normal_text(text)

    @cached_property
    def loose(self) -> str:
        """Its letters and digits alone."""
        return _NOT_WORD.sub("", self.text)

    def has(self, term: str) -> bool:
        """Whether what a sentence names occurs, in whatever spelling."""
        value = normal_text(term[:MAX_IDENTIFIER_LEN])
        return not value or self.holds(value) or self._otherwise(value)

    def holds(self, value: str, *, prefix: bool = False) -> bool:
        """Whether ``value`` occurs as a whole word or phrase, or as the beginning of a word."""
        text = self.text
        return any(
            _starts(text, at, value) and (prefix or _ends(text, at + len(value), value))
            for at in places(text, value, most=MAX_LOOKED)
        )

    def _otherwise(self, value: str) -> bool:
        """Whether the material has ``value`` in another spelling."""
        if date := _DATE.match(value):
            return any(self.holds(spelling) for spelling in _dates(*date.groups()))
        if _NUMBER.fullmatch(value):
            whole = value.rstrip("0").rstrip(".") if "." in value else f"{value}.00"
            return self.holds(whole) or self.holds(f"{value}.0")
        if "://" in value:
            return self.holds(value.partition("://")[2].removeprefix("www.").rstrip("/"))
        if value.isalpha():
            return self.holds(value[: max(MIN_NAME_LEN, len(value) - INFLECTED)], prefix=True)
        if "/" in value and all(self.holds(part) for part in _PARTS.findall(value.lstrip("~."))):
            return True
        return (_HEX.match(value) is not None and self.holds(value, prefix=True)) or self._holds_loosely(value)

    def _holds_loosely(self, value: str) -> bool:
        """Whether the letters and digits of ``value`` occur in a row, and not as a part of a longer number."""
        value = _NOT_WORD.sub("", value)
        if len(value) <= MIN_LOOSE_LEN or value.isdigit():
            return False
        text = self.loose
        return any(
            not (value[0].isdigit() and text[at - 1 : at].isdigit())
            and not (value[-1].isdigit() and text[at + len(value) : at + len(value) + 1].isdigit())
            for at in places(text, value, most=MAX_LOOKED)
        )


def places(text: str, value: str, *, most: int) -> Iterator[int]:
    """Where ``value`` stands in ``text``, the first so many places."""
    at = text.find(value)
    while at >= 0 and most > 0:
        yield at
        most -= 1
        at = text.find(value, at + 1)


def _starts(text: str, at: int, value: str) -> bool:
    """Whether a word begins here; an escaped line end of JSON is no part of a word."""
    if at == 0 or not value[0].isalnum() or not _joins(text[at - 1], value[0]):
        return True
    return at > 1 and text[at - 2] == "\\" and text[at - 1] in "ntr"


def _ends(text: str, end: int, value: str) -> bool:
    return end >= len(text) or not value[-1].isalnum() or not _joins(text[end], value[-1])


def _joins(other: str, own: str) -> bool:
    """Whether two characters side by side are of one word: scripts without blanks follow Latin ones directly."""
    return other.isalnum() and other.isascii() == own.isascii()


def hard_terms(text: str, *, names: bool = True) -> tuple[str, ...]:
    """What a sentence cannot paraphrase: identifiers, numbers, what stands in quotation marks, and names.

    A name is a word with a capital that does not begin a sentence; ``names`` is false where a language writes other
    words so as well.
    """
    found: dict[str, None] = {}
    for line in text.split("\n"):
        for sentence in sentences(line):
            found.update(dict.fromkeys(_QUOTED.findall(sentence)))
            for n, word in enumerate(WORD.finditer(sentence)):
                said = word.group()
                if _is_hard(said) or (
                    names and n and said[0].isupper() and said.isalpha() and not _follows_mark(sentence, word.start())
                ):
                    found[said] = None
            for number in _NUMBER.findall(_SEPARATED.sub("", sentence)):
                if sum(c.isdigit() for c in number) >= MIN_NUMBER_LEN and number not in found:
                    found[number] = None
    return tuple(t for t in found if not any(t != o and t.isdigit() and t in _NUMBER.findall(o) for o in found))


def _is_hard(word: str) -> bool:
    if _ALTERNATIVES.match(word):
        return False
    return not _NUMBER.fullmatch(word) and (is_identifier(word) or _DOTTED.search(word) is not None)


def _follows_mark(sentence: str, at: int) -> bool:
    """Whether a word begins something: behind a colon, a bracket, a dash or a quotation mark."""
    before = sentence[:at].rstrip()
    return not before or not (before[-1].isalnum() or before[-1] in ",;'\u2019%")


def capitals_tell(*texts: str) -> bool:
    """Whether a capital within a sentence tells a name from other words."""
    large = small = 0
    for text in texts:
        for sentence in sentences(text[-READ_FOR_CAPITALS:]):
            for word in WORD.findall(sentence)[1:]:
                if word.isalpha() and word != word.swapcase():
                    large += word[0].isupper() and word[1:].islower()
                    small += word.islower()
    return large < NAMES_ALL * (large + small) or large + small < 10


def invented(text: str, material: str, *, names: bool = True) -> tuple[str, ...]:
    """The identifiers, longer numbers and names of ``text`` that occur in ``material`` in no spelling, in order."""
    known = _Material(material)
    return tuple(term for term in hard_terms(text, names=names) if not known.has(term))


def grounded(text: str, material: str) -> tuple[str, tuple[str, ...]]:
    """``text`` without the sentences that hold something invented, and what that is."""
    known, names = _Material(material), capitals_tell(text, material)
    wrong = {term for term in hard_terms(text, names=names) if not known.has(term)}
    if not wrong:
        return text, ()
    kept: list[str] = []
    for line in text.split("\n"):
        parts = sentences(line)
        good = [p for p in parts if wrong.isdisjoint(hard_terms(p, names=names))]
        if len(good) == len(parts):
            kept.append(line)
        elif good and any(c.isalnum() for c in "".join(good)):
            kept.append(line[: len(line) - len(line.lstrip())] + " ".join(good).rstrip())
        elif ":" in line[:40] and line[:1].isalpha():
            kept.append(line[: line.index(":") + 1])
    ordered = tuple(term for term in hard_terms(text, names=names) if term in wrong)
    return without_empty_headings("\n".join(kept)), ordered


def without_empty_headings(text: str) -> str:
    """``text`` without headings that nothing follows but another heading or the end."""
    kept: list[str] = []
    below = ""
    for line in reversed(text.split("\n")):
        if _BARE_HEADING.match(line) and (not below or _HEADING.match(below)):
            continue
        kept.append(line)
        below = line if line.strip() else below
    return "\n".join(reversed(kept))


def _dates(one: str, two: str, three: str) -> Iterator[str]:
    """Other spellings of a date in numbers: every order, with and without zeros in front."""
    for parts in permutations((one, two, three)):
        for mark in "-./":
            yield mark.join(parts)
            yield mark.join(part.zfill(2) for part in parts)
            yield mark.join(part.lstrip("0") for part in parts)


def missing(text: str, material: str) -> Mentions:
    """What a summary should name of its material: the paths most used, and what the last errors name."""
    known = _Material(text)
    wanted = [*_of_errors(material), *_paths(material)]
    unique = tuple(dict.fromkeys(w for w in wanted if w))
    return Mentions(unique, tuple(w for w in unique if not known.holds(normal_text(w))))


def _paths(material: str) -> list[str]:
    """The names of the files that the material mentions most, twice at the least, in that order."""
    counts: Counter[str] = Counter()
    for word in _PATH.findall(material):
        if "/" in word and "//" not in word:
            name = word.rstrip("./").rpartition("/")[2]
            stem, dot, ending = name.rpartition(".")
            if stem and dot and 0 < len(ending) <= 5 and ending.isalnum() and not ending.isdigit():
                counts[name] += 1
    return [name for name, times in counts.most_common(MAX_PATHS) if times > 1]


def _of_errors(material: str) -> Iterator[str]:
    """Identifiers of the last lines that report an error."""
    told: dict[str, None] = {}
    for line in reversed(material[-ERRORS_WITHIN:].splitlines()):
        if len(told) == MAX_ERRORS:
            break
        line = line[:400]
        if reports_error(line):
            told.setdefault(line.strip())
    for line in told:
        found = [w for w in WORD.findall(line) if _is_hard(w)] + _STATUS.findall(line)
        yield from (v for v in found[:MAX_OF_ERROR] if len(v) > MIN_NUMBER_LEN)


def lost_lines(previous: str, text: str, *, fresh: str) -> tuple[str, ...]:
    """Lines of the previous notes that name what the new ones do not, unless it came up again since."""
    now, since = _Material(text), _Material(fresh)
    lost: list[str] = []
    for line in previous.split("\n"):
        gone = [t for t in hard_terms(line, names=False) if not now.has(t)]
        if gone and not any(since.has(t) for t in gone):
            lost.append(line.strip(" -*"))
    return tuple(lost)
