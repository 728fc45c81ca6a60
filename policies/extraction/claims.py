"""What a statement claims: values with their types, the attributes that it names, whose they are, and its mood.

The word lists are ordinary English for properties that have one value at a time (:data:`ATTRIBUTES`: a port, a
deadline, an approver), for values that no literal marks (units, tones, days), and for taking something back.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from policies.extraction.identifiers import Kind, Mention
from policies.extraction.rules import RULE_THRESHOLD, STOP, WORD, Sentence

MOST_STEMS = 16_384

_NEGATIVE = re.compile(r"\b(?:no|not|never|don['\u2019]?t|cannot|without|avoid|mustn['\u2019]?t)\b", re.IGNORECASE)
_CHANGE = re.compile(
    r"\b(?:actually|instead|no longer|any ?more|scratch that|on second thou?ghts?|chang(?:e|ed|es|ing)|moved"
    r"|switch(?:ed)?"
    r"|correct(?:ion|ed)|rotat(?:ed|ion)|retired|rebased|renamed|replac(?:ed?|es|ing)|revised|postponed|brought forward"
    r"|migrated|raised|lowered|increased|reduced|went (?:up|down)|turned out|make (?:it|that|them)|rather|used to"
    r"|previous(?:ly)?|as of|from (?:now|today)|going forward|dropped|cancel(?:l?ed|s)?|updated?|took over|takes over"
    r"|(?:is|are|was|were) wrong|i meant|sorry"
    r"|push(?:ed)? (?:back|out|forward)|put off|delayed|shift(?:ed)?"
    r"|extended|rescheduled"
    r"|relocated|swap(?:ped)?|upgraded|downgraded|bumped|grew|rose|fell|became|becomes|turned into"
    r"|in (?:the )?future|taken over|hand(?:ed)? over|shut down|ditch"
    r"|revis(?:e|ing)|chang(?:e|ed) (?:of plans?|my mind)"
    r"|no,? wait|wait,? no|hang on"
    r"|wrong|mis(?:typed|spoke|read|took)|typo|mistaken?ly|(?:a|an|the) \w+ change|\w+ change(?=:))\b",
    re.IGNORECASE,
)
_NEWS = re.compile(r"\b(?:now|new|latest|recently|by now|meanwhile|after all)\b", re.IGNORECASE)
_MORE = re.compile(r"\b(?:also|too|another|additional(?:ly)?|as well|second|extra|besides|both)\b", re.IGNORECASE)
_FORGET = re.compile(
    r"(?<!n't )(?<!n\u2019t )(?<!not )(?<!never )\b(?:forget|ignore|disregard|scratch|scrap|drop|never ?mind|take back)"
    r" (?:about )?(?:(?:what|everything|anything) i (?:said|told you|wrote|asked|mentioned) (?:earlier |before )?"
    r"(?:about|on|regarding|for)|my (?:\w+ )?\w+ (?:about|on|regarding)|the|my|that)? ?([^.;!?]{3,90}?)"
    r"(?=[,.;!?]|\Z| and | but )",
    re.IGNORECASE,
)
_A = r"((?:the |our |my |an? )?[^\s,.;:!?]{1,40}(?: [^\s,.;:!?]{1,40}){0,3}?(?:\.\d{1,4})?)"
_OLD = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bfrom {_A} (?:in)?to (?=\S)",
        rf"\bnot (?:on |at |in |for )?{_A},? but (?=\S)",
        (
            r"\b(?:instead of|rather than|in place of|replac(?:es|ed|ing)|no longer|dropped|abandoned|away from"
            rf"|retired) {_A}(?=[,.;:!?]|\Z| with | by | for | and | so | in )"
        ),
        (
            rf"(?:\A|[,;] ){_A} (?:is|are|was) (?:on leave|on holiday|out|gone|off|history|cancell?ed|closed|full"
            r"|sold out|ill|sick|wrong|obsolete)\b"
        ),
        rf"(?:\A|[,;] ){_A} (?:has left|left us|fell through|sounded|won't do|doesn't work)\b",
    )
)
_ATTRIBUTE_WORDS = {
    "money": "budget cap capped spend spending cost costs expense expenses ceiling price limit dollars euros "
    "pounds money fee rent salary",
    "date": "deadline date due ship ships shipping schedule scheduled timing until departure arrival appointment",
    "time": "time o'clock meeting pickup appointment slot",
    "name": "codename code-name name named called calling call label designated designation alias title",
    "timezone": "timezone time-zone times timestamp timestamps clock clocks utc gmt",
    "owner": "on-call oncall owner owns pager duty escalation assignee manager reviewer reviews reviewed",
    "approver": "approver approve approves approval approving",
    "branch": "branch branches rebased trunk",
    "commit": "commit revision",
    "phase": "phase stage milestone progress step",
    "style": "style tone answers answer replies reply responses response citations cite",
    "secret": "code password passcode pin",
    "region": "region zone hosted datacenter",
    "address": "url endpoint host address domain hostname",
    "port": "port",
    "language": "language languages examples",
    "version": "version target",
    "units": "units measurements metric imperial",
    "count": "guests people participants headcount seats copies chapters pages number count rooms nights tickets",
    "age": "age aged",
    "place": "hotel venue hall room restaurant office destination airport gate platform seat",
    "phone": "phone telephone mobile ring number",
    "size": "size width height length sample",
    "frequency": "weekly daily monthly report",
}
ATTRIBUTES: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _ATTRIBUTE_WORDS.items()}
_ATTRIBUTE_OF: dict[str, frozenset[str]] = {
    word: frozenset(n for n, known in ATTRIBUTES.items() if word in known)
    for known in ATTRIBUTES.values()
    for word in known
}
_LEXICAL_WORDS = {
    "units": "metric imperial",
    "tone": "terse brief short concise detailed long verbose formal informal casual playful light warm serious"
    " friendly dry "
    "blunt polite plain chatty",
    "zone": "utc gmt pacific eastern central mountain cet cest est pst bst",
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "diet": "vegan vegetarian kosher halal pescatarian",
}
_LEXICAL: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _LEXICAL_WORDS.items()}
_OF_TYPE = {
    "tone": frozenset({"style"}),
    "zone": frozenset({"timezone"}),
    "units": frozenset({"units", "style"}),
}
_CLAUSE = re.compile(r"(?<=\w)[,;.](?=\s)|\s[\u2013\u2014-]\s")
_CORRECTS = re.compile(
    r"\b(?:actually|make (?:it|that|them)|scratch that|i meant?|sorry|correction|on second thou?ghts?)\b"
    r"|\A(?:no|wait|instead|rather)\b",
    re.IGNORECASE,
)
_VALUE_WORDS = frozenset(w for known in _LEXICAL.values() for w in known)
_MONEY = re.compile(r"dollars?|euros?|pounds?|USD|EUR|GBP|[$€£]", re.IGNORECASE)
_AGE = re.compile(
    r"\b(?:is|am|are|turned|turns|['\u2019]m|['\u2019]s) (\d{1,2})\b(?! ?[\w%:/.-]*\d)(?=[,.;!?]|\Z| now| and| years)",
    re.IGNORECASE,
)
_OF_AGE = re.compile(r"\bage[ds]?\b", re.IGNORECASE)
_COPULAS = "is are was were be been has have had will must"
_COPULA = frozenset(_COPULAS.split())
_QUIET_WORDS = (
    "one two three four five six seven eight nine ten both same other belong belongs handling handles lands runs lives "
    "goes stands comes take takes asks told said says need needs make made set put show shows report reports reported "
    "give gives given first total every whole stays fixed allowed below above least most earlier before after today "
    "yesterday tomorrow week month year "
)
_QUIET = frozenset(_QUIET_WORDS.split())


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a statement: its type, its normal form, and where it stands."""

    type: str
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What a statement claims: values, the attributes named, whose (``scope``), all content words, and its mood."""

    values: tuple[Value, ...]
    words: frozenset[str]
    attributes: frozenset[str]
    scope: frozenset[str]
    befores: tuple[tuple[str, str], ...]
    changes: bool
    news: bool
    more: bool
    negative: bool
    forgets: frozenset[str]
    olds: tuple[frozenset[str], ...]
    is_elliptic: bool
    """Whether it says hardly more than that a value changes ("actually make it noon")."""
    types: frozenset[str]


@lru_cache(maxsize=MOST_STEMS)
def stem(word: str) -> str:
    """A word without its ending, small; irregular forms are left as they are."""
    word = word.lower().replace("\u2019", "'").removesuffix("'s")
    for suffix in ("ings", "ing", "ed", "es", "er", "s", "e"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 4:
            return word[: -len(suffix)]
    return word


def frame(sentence: Sentence) -> Frame | None:
    """The claims of a statement; None for one that can neither replace another nor be replaced."""
    text = sentence.text[:600]
    body_at = text.index(":") + 1 if sentence.label and ":" in text else 0
    values = tuple(_values(text, sentence.mentions, first=body_at))
    changes = bool(_CHANGE.search(text, body_at))
    forgets = frozenset(w for m in _FORGET.finditer(text) for w in content(m.group(1)))
    if text.rstrip().endswith("?") or not (values or changes or forgets or sentence.rule >= RULE_THRESHOLD):
        return None
    olds = tuple(filter(None, (content(m.group(1), names=True) for old in _OLD for m in old.finditer(text, body_at))))
    taken = [(v.start, v.end) for v in values if v.type not in _LEXICAL]
    tokens = [
        (part.lower(), m.start())
        for m in WORD.finditer(text, body_at)
        if not any(a <= m.start() < b for a, b in taken)
        for part in (m.group().split("-") if m.group().lower() not in _ATTRIBUTE_OF else (m.group(),))
    ]
    attributes = frozenset(a for w, _ in tokens for a in _ATTRIBUTE_OF.get(w, ()))
    attributes |= frozenset(a for v in values for a in _OF_TYPE.get(v.type, ()))
    if any(v.type == "age" for v in values):
        attributes |= {"age"}
    words = frozenset(stem(w) for w, _ in tokens if _tells(w))
    befores = tuple((stem(a), stem(b)) for (a, _), (b, _) in pairwise(tokens) if _tells(a))
    return Frame(
        values=values,
        words=words,
        attributes=attributes,
        scope=_scope(tokens),
        befores=befores,
        changes=changes,
        news=bool(_NEWS.search(text, body_at)),
        more=bool(_MORE.search(text, body_at)),
        negative=bool(_NEGATIVE.search(text, body_at)),
        forgets=forgets,
        olds=olds,
        is_elliptic=_is_elliptic(text, tokens, values),
        types=frozenset(v.type for v in values),
    )


def _is_elliptic(text: str, tokens: Sequence[tuple[str, int]], values: Sequence[Value]) -> bool:
    clause = _CLAUSE.search(text)
    end = clause.start() if clause else len(text)
    if not _CORRECTS.search(text, 0, end) and not (_CORRECTS.match(text) and len(tokens) <= 6):
        return False
    if not any(v.start < end for v in values):
        return False
    return (
        not any(w in _ATTRIBUTE_OF for w, at in tokens if at < end)
        and sum(_tells(w) for w, at in tokens if at < end) <= 1
    )


def _tells(word: str) -> bool:
    return (
        len(word) > 2
        and word not in STOP
        and word.removesuffix("s") not in STOP
        and word not in _ATTRIBUTE_OF
        and word not in _QUIET
        and word not in _VALUE_WORDS
    )


def content(text: str, *, names: bool = False) -> frozenset[str]:
    """The stems of a phrase's telling words, numbers too."""
    found = re.findall(r"[\w.$€£'\u2019-]*\w", text)
    kept = {
        w.lower() if any(c.isdigit() for c in w) else stem(w)
        for w in found
        if w.lower() not in STOP or (names and w[0].isdigit())
    }
    return frozenset(w for w in kept if len(w) > 1)


def _scope(tokens: Sequence[tuple[str, int]]) -> frozenset[str]:
    """The stems of the words beside attribute nouns: those before each, and what follows "of" or "for" behind it."""
    found: set[str] = set()
    for i, (word, _) in enumerate(tokens):
        if word not in _ATTRIBUTE_OF:
            continue
        for j in range(i - 1, max(-1, i - 4), -1):
            if tokens[j][0] in _ATTRIBUTE_OF:
                if not _ATTRIBUTE_OF[tokens[j][0]] & _ATTRIBUTE_OF[word]:
                    found.add(stem(tokens[j][0]))
                continue
            if tokens[j][0] in _COPULA:
                continue
            if not _tells(tokens[j][0]):
                break
            found.add(stem(tokens[j][0]))
        if i + 1 < len(tokens) and tokens[i + 1][0] in {"of", "for"}:
            found.update(stem(w) for w, _ in tokens[i + 2 : i + 5] if _tells(w))
    return frozenset(found)


_TYPE: dict[Kind, str] = {
    Kind.DATE: "date", Kind.TIME: "time", Kind.AMOUNT: "amount", Kind.PATH: "path", Kind.HOST: "host", Kind.URL: "host",
    Kind.EMAIL: "email", Kind.CODE: "code", Kind.NUMBER: "number", Kind.NAME: "name", Kind.SYMBOL: "symbol",
}  # fmt: skip


def _values(text: str, mentions: Sequence[Mention], *, first: int) -> Iterator[Value]:
    age = _AGE.search(text, first)
    for m in mentions:
        if m.start < first:
            continue
        type_ = _TYPE.get(m.kind, "")
        end = m.start + len(m.value)
        low = m.value.lower()
        if m.kind is Kind.QUANTITY:
            type_ = (
                "amount" if _MONEY.search(m.value) else f"quantity {stem(low.split()[-1])}" if " " in low else "number"
            )
        elif m.kind is Kind.NAME and (low.split()[0] in _LEXICAL["zone"] | _LEXICAL["day"] or _opens(text, m, first)):
            continue
        elif m.kind is Kind.NUMBER and ((age and age.start(1) == m.start) or _OF_AGE.search(text, first)):
            type_ = "age"
        elif m.kind is Kind.NUMBER and _MONEY.match(text[end : end + 9].lstrip()):
            type_ = "amount"
        if type_:
            yield Value(type_, low, m.start, end)
    for match in WORD.finditer(text, first):
        word = match.group().lower()
        for type_, known in _LEXICAL.items():
            if word in known:
                yield Value(type_, word, match.start(), match.end())


def _opens(text: str, mention: Mention, first: int) -> bool:
    """Whether a single capitalised word is only the first of a sentence."""
    return " " not in mention.value and not text[first : mention.start].strip() and not mention.value.isupper()
