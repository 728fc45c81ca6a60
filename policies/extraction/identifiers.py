"""What in a text is worth keeping letter by letter: identifiers, amounts, dates, names, paths, error strings.

Every pattern is bounded and starts at a word's edge, so scanning is linear in the length of the text.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a literal is; :data:`WEIGHTS` says how much losing one costs."""

    URL = "url"
    HOST = "host"
    EMAIL = "email"
    PATH = "path"
    CODE = "code"
    DATE = "date"
    TIME = "time"
    AMOUNT = "amount"
    QUANTITY = "quantity"
    NUMBER = "number"
    SYMBOL = "symbol"
    NAME = "name"
    QUOTE = "quote"
    WORD = "word"


WEIGHTS: dict[Kind, float] = {
    Kind.CODE: 1.0,
    Kind.URL: 0.9,
    Kind.HOST: 0.9,
    Kind.EMAIL: 0.8,
    Kind.PATH: 0.95,
    Kind.DATE: 0.8,
    Kind.AMOUNT: 0.6,
    Kind.SYMBOL: 0.75,
    Kind.QUANTITY: 0.55,
    Kind.TIME: 0.5,
    Kind.NUMBER: 0.3,
    Kind.NAME: 0.45,
    Kind.QUOTE: 0.5,
    Kind.WORD: 0.15,
}

STRONG = frozenset({Kind.CODE, Kind.URL, Kind.HOST, Kind.EMAIL, Kind.PATH, Kind.DATE, Kind.AMOUNT, Kind.SYMBOL})

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_COUNT = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|eighteen|"
    r"twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand)"
)
_UNIT = (
    r"(?:%|percent|degrees?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|times|pages?|miles?|"
    r"km|kg|g|mg|lbs?|pounds?|ounces?|oz|cm|mm|m|ft|feet|inch(?:es)?|ms|[KMGT]i?B|bytes?|tokens?|people|copies|items?|"
    r"dollars?|euros?|USD|EUR|GBP|rps|Hz|[kMG]Hz|users?|rows?|lines?|files?|phases?|steps?|units?)"
)
_LITERAL = re.compile(
    rf"""
    (?:(?<!\w)(?=[\w$€£~./"“`*@+-])|(?=[#$€£/]))
    (?:(?![a-z])|(?!(?:[a-z]{{1,40}})(?:[\s,;!?)]|\.\s))|(?={_COUNT}\b|once\b|twice\b))
    (?:
    (?P<url>\bhttps?://[^\s<>"'`)\]}}]{{3,300}})
  | (?P<host>\b[a-z0-9][\w-]{{0,40}}(?:\.[a-z0-9][\w-]{{0,40}}){{0,4}}\.(?:com|net|org|io|dev|app|internal|local|lan)\b
      (?::\d{{2,5}})?(?:/[\w.@+-]{{1,80}}){{0,8}})
  | (?P<email>\b[\w.+-]{{1,64}}@[\w-]{{1,64}}(?:\.[\w-]{{1,24}}){{1,4}})
  | (?P<date>\b\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]\d{{2}}:\d{{2}}(?::\d{{2}})?Z?)?
      | \b\d{{1,2}}/\d{{1,2}}/\d{{2,4}}\b
      | \b{_MONTH}\.?\ \d{{1,2}}(?:st|nd|rd|th)?(?:,?\ \d{{4}})?\b
      | \b\d{{1,2}}(?:st|nd|rd|th)?\ (?:of\ )?{_MONTH}\b(?:\ \d{{4}})?)
  | (?P<time>\b\d{{1,2}}:\d{{2}}(?::\d{{2}})?(?:\ ?[ap]\.?m\b\.?)? | \b\d{{1,2}}\ ?[ap]m\b)
  | (?P<amount>[$€£]\ ?\d[\d,]{{0,15}}(?:\.\d{{1,4}})?(?:[kKmM]\b|\ (?:million|billion)\b)?)
  | (?P<path>(?<![\w/.])(?:~|\.{{1,2}})?(?:/[\w.@+-]{{1,80}}){{1,16}}/?
      | \b[\w@+-][\w.@+-]{{0,60}}(?:/[\w.@+-]{{1,80}}){{1,16}}
      | \b[A-Za-z]:\\[\w\\.-]{{2,160}}
      | \b[\w-]{{1,60}}(?:\.[\w-]{{1,40}}){{0,3}}\.(?:py|js|jsx|ts|tsx|go|rs|c|cc|cpp|h|hpp|java|kt|rb|php|sh|md|
        txt|jsonl?|ya?ml|toml|ini|cfg|conf|lock|xml|html|css|scss|csv|tsv|sql|db|sqlite|log|enc|bin|pdf|png|jpe?g|svg|zip|tar|gz|whl|
        ipynb|pcap|docx?|xlsx?|pptx?|env|proto|tf)\b)
  | (?P<code>\#[A-Za-z]{{0,4}}\d[\w-]{{2,40}}
      | \b(?=[\w-]{{0,60}}\d)(?=[\w-]{{0,60}}[A-Za-z])[A-Za-z0-9][\w-]{{2,90}}\b
      | \b\d{{5,40}}\b
      | \b\d{{1,5}}(?:\.\d{{1,5}}){{2,3}}(?:[-+][\w.]{{1,20}})?)
  | (?P<quantity>\b(?:\d[\d,]{{0,12}}(?:\.\d{{1,6}})?|{_COUNT}(?:[ -](?:and\ )?{_COUNT}){{0,4}})
        (?:-\d{{1,6}})?[\ -]?{_UNIT}\b
      | \b\d{{1,6}}\ (?:of|out\ of)\ \d{{1,6}}\b | \b\d[\d,.]{{0,12}}% | \b(?:once|twice)\b(?:\ an?\ \w{{2,9}})?)
  | (?P<symbol>\b[A-Za-z]\w{{0,60}}_\w{{1,60}}(?:\(\))? | \b[a-z]{{2,30}}(?:[A-Z][a-z0-9]{{1,30}}){{1,6}}\b
      | \b(?:[A-Z][a-z0-9]{{1,24}}){{2,6}}(?:Error|Exception|Warning)?\b
      | \b\w{{1,40}}(?:\.\w{{1,40}}){{1,6}}\(\) | \b\w{{1,40}}\(\))
  | (?P<number>(?<![\w.])-?\d[\d,]{{0,15}}(?:\.\d{{1,8}})?\b)
  | (?P<quote>"[^"\n]{{2,60}}" | “[^”\n]{{2,60}}” | `[^`\n]{{2,80}}` | \*\*[^*\n]{{2,60}}\*\*)
  | (?P<name>\b[A-Z][\w'\u2019&-]{{1,30}}
      (?:\ (?:of|the|de|do|da|du|di|del|von|van|der|and|&|at|for)\ (?=[A-Z])|\ (?=[A-Z]))?
      (?:[A-Z0-9][\w'\u2019&-]{{0,30}})?
      (?:\ [A-Z0-9][\w'\u2019&-]{{0,30}}){{0,4}})
    )
    """,
    re.VERBOSE,
)
_SHORT = frozenset({"AM", "PM", "EST", "AI", "OK", "FAQ", "TV", "USA", "The", "And"})
_DIGIT_RUN = re.compile(r"\d+")
_UPPER_RUN = re.compile(r"[A-Z]+")
_LOWER_RUN = re.compile(r"[a-z]+")
_INSIDE = re.compile(r"[a-z0-9,;\u2019'][)\"\u2019]?\s\Z")
_ORDINAL = re.compile(r"\d{1,3}(?:st|nd|rd|th|s)\Z", re.IGNORECASE)

_STARTS = (
    "the a an i it its this that these those there here he she they we you my your our their his her is are was "
    "were do does did can could would should will may might must have has had yes no not ok okay sure thanks "
    "thank please hi hello hey if when while before after as so but and or for from to in on at by with of let "
    "also what which who how why where however once since although additionally some any all each every both many "
    "most more here's it's i'm i've i'd i'll you're that's let's great good remember note make use using try "
    "consider overall finally first second third next then now absolutely certainly congratulations keep be don't "
    "never always only get go one look find check add set take give show ask tell create choose start end "
)
COMMON_STARTS = frozenset(_STARTS.split())


@dataclass(frozen=True, slots=True)
class Mention:
    """A literal at ``start`` of a text."""

    value: str
    kind: Kind
    start: int


def shape(value: str) -> str:
    """The pattern of a literal with every run of digits as 9, of capitals as A, of small letters as a."""
    return _DIGIT_RUN.sub("9", _LOWER_RUN.sub("a", _UPPER_RUN.sub("A", value[:80])))


def classify(value: str) -> Kind:
    """The kind of a whole value such as a JSON leaf; WORD for plain words and sentences."""
    match = _LITERAL.match(value)
    if match is None or match.end() < len(value):
        return Kind.NAME if value[:1].isupper() and len(value) <= 60 else Kind.WORD
    return _kind_of(match, value)


def _kind_of(match: re.Match[str], value: str) -> Kind:
    kind = Kind(match.lastgroup or "word")
    if kind is Kind.CODE and _ORDINAL.match(value):
        return Kind.NUMBER
    if kind is Kind.NAME and (len(value) < 3 or value in _SHORT):
        return Kind.WORD
    return kind


def scan(text: str) -> tuple[Mention, ...]:
    """Every literal of ``text`` in order, without trailing punctuation; common sentence openers are no names."""
    found: list[Mention] = []
    for match in _LITERAL.finditer(text):
        value, start = match.group(), match.start()
        kind = _kind_of(match, value)
        if kind is Kind.QUOTE:
            value, start = value.strip('"“”`* :'), start + 1
        elif kind is Kind.WORD:
            continue
        elif kind is Kind.NAME:
            value, start = _trim_name(value, start)
            if value.isalpha() and not value.isupper() and not _INSIDE.search(text, max(0, start - 4), start):
                continue
        value = value.rstrip(".,;:!?-'\u2019")
        if len(value) > 1 or kind is Kind.NUMBER:
            found.append(Mention(value, kind, start))
    return tuple(found)


def _trim_name(value: str, start: int) -> tuple[str, int]:
    while value:
        first, _, rest = value.partition(" ")
        if first.lower() not in COMMON_STARTS:
            return value, start
        value, start = rest, start + len(first) + 1
    return "", start


def literals(text: str) -> frozenset[str]:
    """The distinct literals of ``text``, names and plain numbers included."""
    return frozenset(m.value for m in scan(text))
