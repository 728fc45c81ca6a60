"""Results and answers as short labelled passages, the raw material of the extract's facts."""

import re
from bisect import bisect_left
from collections.abc import Iterator

from policies.findings import ERROR, informative_lines, key_argument, leaves, parse
from policies.identifiers import STRONG, WEIGHTS, Kind, Mention, scan
from policies.rules import sentences

Passage = tuple[str, str, str, Kind, float]
"""Group, key, text, kind, weight."""

IN_HEADING = ""
"""The text of a passage that the group's heading already says."""
_ITEM = re.compile(r"^\s{0,12}(?:[-*•+]|\d{1,3}[.)]|#{1,6})\s+(\*\*)?(.{2,200})", re.MULTILINE)
_HEAD_END = re.compile(r"\*\*|:\s|\s[-\u2013—]\s|:$|\.\s|\.$|\s\((?![A-Z0-9]{2,6}\))|;")
_TOPIC = re.compile(r"[A-Za-z][A-Za-z'\u2019-]{3,24}")
_DULL_WORDS = (
    "what that this with have from about would could should like some your them there their they been were when "
    "where which recommend recommendations think know help need want also just really going looking wondering "
    "suggest suggestions give tell more most much many into than then very good great thanks thank please sure "
    "definitely trying being made make sounds idea ideas sound way ways best other tips specific recently "
    "actually currently those these will does "
)
_DULL = frozenset(_DULL_WORDS.split())
_FUNCTION = (
    "is are was were be been it its this that we i our us so there has have had will would also just really very"
)
_FUNCTIONWORDS = frozenset(_FUNCTION.split())
_BEFORE = re.compile(r"(?:[\w'\u2019%-]+\W{1,3}){0,2}\Z")
_AFTER = re.compile(r"\A[ -][a-z]{3,16}")


def topic(text: str, *, words: int = 3) -> str:
    """A few telling words of a user's message, to label the answer with; "answer" where there are none."""
    found = list(dict.fromkeys(w.lower() for w in _TOPIC.findall(text[:600]) if w.lower() not in _DULL))
    picked = sorted(sorted(found, key=lambda w: -len(w))[:words], key=found.index)
    return " ".join(picked) or "answer"


def result_passages(text: str, *, tool: str, arguments: str) -> Iterator[Passage]:
    """The passages of one tool call and its result, under a heading that names both."""
    primary = key_argument(arguments)
    group = f"{tool}({primary})" if primary else tool or "result"
    asked = parse(arguments) if arguments else None
    for leaf in leaves(asked) if asked is not None else ():
        if leaf.value not in primary:
            yield group, leaf.key, leaf.text, leaf.kind, leaf.weight
        else:
            yield group, leaf.key, IN_HEADING, leaf.kind, leaf.weight * 0.9
    document = parse(text)
    if document is not None:
        for leaf in leaves(document):
            yield group, leaf.key, leaf.text, leaf.kind, leaf.weight
        return
    yield from _plain(text, group=group)


def _plain(text: str, *, group: str) -> Iterator[Passage]:
    short = len(text) <= 200
    if short and text.strip():
        yield group, "", " ".join(text.split()), Kind.WORD, 1.0 if ERROR.search(text) else 0.4
        return
    for line, weight in informative_lines(text, limit=0):
        yield group, "", line, Kind.WORD, weight
    for mention in scan(text[:200_000])[:1_500]:
        if mention.kind in STRONG:
            yield group, "", mention.value, mention.kind, WEIGHTS[mention.kind] * 0.8
        elif mention.kind in {Kind.QUANTITY, Kind.TIME}:
            yield group, "", _labelled(text, mention), mention.kind, WEIGHTS[mention.kind] * 0.6


def named_by_user(text: str) -> Iterator[Passage]:
    """The literals of a user's message that its sentences may be too long to carry."""
    for mention in scan(text[:20_000]):
        if mention.kind in STRONG:
            yield "the user named", "", mention.value, mention.kind, 1.2


def answer_passages(text: str, *, group: str) -> Iterator[Passage]:
    """The passages of one answer: heads of lists, names, quantities with their noun, then telling sentences."""
    for match in _ITEM.finditer(text[:200_000]):
        body = match.group(2)
        end = _HEAD_END.search(body, 1)
        head = body[: end.start() if end else len(body)].strip(" *:`")
        if 2 <= len(head) <= 80:
            yield group, "", head, Kind.QUOTE, 0.55
    mentions = scan(text[:200_000])[:1_500]
    for mention in mentions:
        weight = WEIGHTS[mention.kind]
        if mention.kind in {Kind.QUANTITY, Kind.TIME, Kind.AMOUNT}:
            yield group, "", _labelled(text, mention), mention.kind, weight * 0.8
        elif mention.kind is not Kind.NUMBER:
            single = mention.kind is Kind.NAME and " " not in mention.value
            yield group, "", mention.value, mention.kind, weight * (0.55 if single else 0.9)
    starts = [m.start for m in mentions]
    at = 0
    for sentence in sentences(text[:200_000], longest=300):
        at = max(at, text.find(sentence[:40], at))
        held = bisect_left(starts, at + len(sentence)) - bisect_left(starts, at)
        if len(sentence) > 30:
            yield group, "", sentence, Kind.WORD, 0.25 + min(0.75, 0.15 * held)


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
