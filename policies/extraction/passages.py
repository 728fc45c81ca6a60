"""Results and answers as short labelled passages, the raw material of the extract's facts."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from policies.extraction.findings import ERROR, Leaf, informative_lines, is_code, key_argument, leaves, parse
from policies.extraction.identifiers import STRONG, WEIGHTS, Kind, Mention, scan, shape
from policies.extraction.rules import sentences

MOST_READ = 200_000
"""Characters of one message that are read for passages."""
MOST_MENTIONS = 1_500
LONGEST_WORD = 70
"""A longer run without a blank is no word of anybody."""
CROWD = 0.1
"""Of n values under one key of a result, each is worth n to the power of minus this."""
ANSWER = ""
"""The group of an answer's passages: its heading is what was asked, which its message does not say."""


class Passage(NamedTuple):
    """A text under a heading (``group``), with the key that labels it and the literals that it carries.

    ``record`` numbers the object of a JSON result that it stands in; an empty ``text`` means that the heading
    says it already. ``weight`` is how much it tells by itself; ``shape`` is the pattern of a single literal.
    """

    group: str
    key: str
    text: str
    kind: Kind
    weight: float
    keys: frozenset[str]
    record: int = 0
    shape: str = "-"


_ITEM = re.compile(r"^\s{0,12}(?:[-*•+]|\d{1,3}[.)]|#{1,6})\s+(\*\*)?(.{2,200})", re.MULTILINE)
_HEAD_END = re.compile(r"\*\*|:\s|\s[-\u2013—]\s|:$|\.\s|\.$|\s\((?![A-Z0-9]{2,6}\))|;")
_FUNCTION = (
    "is are was were be been it its this that we i our us so there has have had will would also just really very"
)
_FUNCTIONWORDS = frozenset(_FUNCTION.split())
_BEFORE = re.compile(r"(?:[\w'\u2019%-]+\W{1,3}){0,2}\Z")
_AFTER = re.compile(r"\A[ -][a-z]{3,16}")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_ALNUM = re.compile(r"[^\W_]+")
_OUTPUT = re.compile(
    r"\s*(?:\d{1,5}[:|]|File \"|Traceback \(|>>> |\$ |[+-]{3} |@@ |at [\w.$]+\(|</?\w+>|[{}\]]|#include|(?:def"
    r"|class) \w+\W"
    r"|(?:from \S+ )?import \S+$|[-=_*#~]{4,}|[\w.-]+[@:~]\S*[$#]|-rw|drwx|- ?[EFW]\d{3,4}\b)"
)


def is_prose(text: str) -> bool:
    """Whether a line or sentence reads as somebody's words rather than as the output of a program."""
    solid = len(text) - text.count(" ")
    if solid < 2 or _OUTPUT.match(text):
        return False
    spoken = sum(map(len, _ALNUM.findall(text)))
    words = _WORDS.findall(text)
    if not words or (solid > LONGEST_WORD and len(max(text.split(), key=len)) > LONGEST_WORD):
        return False
    return spoken >= 0.78 * solid and sum(map(len, words)) >= 0.4 * solid


_POLITE = re.compile(
    r"\A(?:(?:and|so|also|oh|well|by the way),? )?"
    r"(?:(?:can|could|would|will|do) you (?:please |kindly )?(?:recommend|suggest|tell me|give me|show me|help"
    r" me(?: with| find)?"
    r"|explain|describe|have|know|think|provide)?(?: of)?|(?:what|which) (?:is|are|do you think|would be)"
    r"|i(?:['\u2019]m| am|['\u2019]ve been| would|['\u2019]d)? (?:\w+ly )?(?:looking|interested|wondering|trying"
    r"|planning|thinking|like|want|need)"
    r"(?: for| in| if| to| about)?(?: learn| learning)?)"
    r"(?: (?:me|us|some|any|a few|a|an|the|more|about|for|on|of|that|specific|new|good|resources|recommendations"
    r"|tips|ideas|suggestions"
    r"|focus(?:ing)?|options|ways?|best))* ",
    re.IGNORECASE,
)


def question(text: str, *, longest: int = 40) -> str:
    """What a user's message asks, in at most so many characters cut between words, to head the answer with."""
    said = [s for s in sentences(text[:2_000]) if len(s) > 8 and is_prose(s)]
    asked = next((s for s in said if s.endswith("?")), said[0] if said else "")
    asked = re.sub(r"\A(?:(?:Hi|Hello|Hey|Thanks|Thank you|That's great|Okay|OK)\b[^,.!]{0,30}[,.!] ?)+", "", asked)
    asked = " ".join(asked.split()).replace(":", "")
    bare = _POLITE.sub("", asked)
    asked = bare if len(bare) >= longest // 3 else asked
    if len(asked) <= longest:
        return asked.rstrip(".")
    if asked.find(" ", longest // 2, longest) < 0:
        return ""
    return f"{asked[: asked.rfind(' ', 0, longest)].rstrip(' ,;-')}…"


def result_passages(text: str, *, tool: str, arguments: str) -> Iterator[Passage]:
    """The passages of one tool call and its result, under a heading that names both."""
    primary = key_argument(arguments)
    group = f"{tool}({primary})" if primary else tool or "result"
    asked = parse(arguments) if arguments else None
    for leaf in leaves(asked) if asked is not None else ():
        shown = leaf.value in primary
        yield _from_leaf(leaf, group=group, weight=leaf.weight * (0.9 if shown else 0.8), shown=shown)
    document = parse(text)
    if document is not None:
        found = leaves(document)
        siblings = Counter(leaf.key for leaf in found)
        for leaf in found:
            known = len(leaf.value) > 2 and leaf.value in primary
            weight = leaf.weight * siblings[leaf.key] ** -CROWD
            yield _from_leaf(leaf, group=group, weight=weight, offset=100_000, shown=known)
        return
    yield from output_passages(text, group=group)


def _from_leaf(leaf: Leaf, *, group: str, weight: float, offset: int = 0, shown: bool = False) -> Passage:
    keys = frozenset((leaf.value.lower(),)) if leaf.kind is not Kind.WORD else frozenset[str]()
    text = "" if shown else leaf.value
    form = shape(leaf.value) if leaf.kind is not Kind.WORD else "-"
    return Passage(group, leaf.label, text, leaf.kind, weight, keys, leaf.record + offset, form)


def output_passages(text: str, *, group: str) -> Iterator[Passage]:
    """The passages of a plain text that a program wrote: what it says in full if short, else telling lines and"
    " literals."""
    if len(text) <= 200:
        said = " ".join(text.split())
        if said:
            keys = frozenset(m.value.lower() for m in scan(said))
            yield Passage(group, "", said, Kind.WORD, 1.0 if ERROR.search(said) and not is_code(said) else 0.4, keys)
        return
    for line, weight in informative_lines(text, limit=0):
        yield Passage(group, "", line, Kind.WORD, weight, frozenset(m.value.lower() for m in scan(line)))
    for mention in scan(text[:MOST_READ])[:MOST_MENTIONS]:
        if mention.kind in STRONG:
            yield _alone(group, mention.value, mention, 0.8)
        elif mention.kind in {Kind.QUANTITY, Kind.TIME}:
            yield _alone(group, _labelled(text, mention), mention, 0.6)


def _alone(group: str, text: str, mention: Mention, share: float) -> Passage:
    kind = mention.kind
    keys = frozenset((mention.value.lower(),))
    return Passage(group, "", text, kind, WEIGHTS[kind] * share, keys, 0, shape(mention.value))


def named_by_user(mentions: tuple[Mention, ...]) -> Iterator[Passage]:
    """The literals of a user's message that its sentences may be too long to carry."""
    for mention in mentions:
        if mention.kind in STRONG:
            yield _alone("the user named", mention.value, mention, 1.2 / WEIGHTS[mention.kind])


def answer_passages(text: str) -> Iterator[Passage]:
    """The passages of one answer: heads of lists, names, quantities with their noun, then telling sentences."""
    text = text[:MOST_READ]
    for match in _ITEM.finditer(text):
        body = match.group(2)
        end = _HEAD_END.search(body, 1)
        head = body[: end.start() if end else len(body)].strip(" *:`")
        if 2 <= len(head) <= 80:
            yield Passage(ANSWER, "", head, Kind.QUOTE, 0.55, frozenset((head.lower(),)))
    mentions = scan(text)[:MOST_MENTIONS]
    for mention in mentions:
        if mention.kind in {Kind.QUANTITY, Kind.TIME, Kind.AMOUNT}:
            yield _alone(ANSWER, _labelled(text, mention), mention, 0.8)
        elif mention.kind is not Kind.NUMBER:
            single = mention.kind is Kind.NAME and " " not in mention.value
            yield _alone(ANSWER, mention.value, mention, 0.55 if single else 0.9)
    starts = [m.start for m in mentions]
    at = 0
    for sentence in sentences(text, longest=300):
        at = max(at, text.find(sentence[:40], at))
        first, last = bisect_left(starts, at), bisect_left(starts, at + len(sentence))
        if len(sentence) > 30 and is_prose(sentence):
            keys = frozenset(m.value.lower() for m in mentions[first:last])
            yield Passage(ANSWER, "", sentence, Kind.WORD, 0.25 + min(0.75, 0.15 * (last - first)), keys)


def _labelled(text: str, mention: Mention) -> str:
    before = _BEFORE.search(text[max(0, mention.start - 40) : mention.start].rpartition("\n")[2])
    end = mention.start + len(mention.value)
    after = _AFTER.search(text[end : end + 20])
    lead = " ".join((before.group() if before else "").split()).strip("*-•([ ")
    return f"{lead} {mention.value}{after.group() if after else ''}".strip()


def telegraph(sentence: str) -> str:
    """The sentence without words that carry no meaning of their own; what it negates or states stays."""
    for mention in scan(sentence):
        if " " in mention.value:
            sentence = sentence.replace(mention.value, mention.value.replace(" ", "\0"), 1)
    words = [
        w for w in re.sub(r"\A(?:The|An?) ", "", sentence).split(" ") if w.lower().strip(".,") not in _FUNCTIONWORDS
    ]
    return " ".join(words).replace("\0", " ")
