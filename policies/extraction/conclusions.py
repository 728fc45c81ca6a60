"""What the assistant concluded on its way: found, decided, tried in vain, done, left to do; and errors left open.

A run of tool calls produces hundreds of identifiers and a handful of such sentences. A model that has to go on needs
the sentences first, so they are read apart from the identifiers and have a share of the extract of their own.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from policies.extraction.findings import ERROR, is_code
from policies.extraction.identifiers import STRONG, Kind, Mention, scan
from policies.extraction.passages import is_prose
from policies.extraction.rules import STOP, WORD, sentences

LONGEST = 320
SHORTEST_NOTE = 40
"""Characters from which a plain statement without any cue may be a finding."""
WEAKEST = 0.7
"""A sentence that weighs less announces a step and concludes nothing."""
VAGUE = 0.25
"""What a conclusion is worth that does not say of what."""
LEAST = 0.45
MOST = 24
"""Conclusions kept of one message."""
EMPHASIS = re.compile(r"\b(?:IMPORTANT|DO_NOT_EVICT)\b")
_I = r"\b(?:i|we)(?:['\u2019](?:ve|d|m|re|ll))?(?: have| had| am| are| will)?"
_CUES: tuple[tuple[str, float, re.Pattern[str]], ...] = tuple(
    (label, weight, re.compile(pattern, re.IGNORECASE))
    for label, weight, pattern in (
        (
            "found",
            1.6,
            (
                r"\broot cause|\b(?:the|real|actual|main) (?:cause|culprit|bug|reason|bottleneck|problem|issue"
                r"|fault)\b|\bcaused by\b|\bcause:"
                r"|\b(?:it )?turns out|\bthat is (?:why|the bug|the cause)\b|\bthis is why\b|\bruled out\b|\bso"
                r" the \w+ (?:is|was|has|must)\b"
            ),
        ),
        (
            "found",
            0.8,
            (
                rf"\bbecause\b|\bdue to\b|\bit (?:seems|appears|looks like)\b|\bthis (?:means|shows|suggests"
                rf"|implies|indicates)\b|\bwhich (?:means|explains)\b"
                rf"|\bconfirm(?:s|ed)\b|{_I} (?:found|noticed|learned|discovered|verified|checked)\b|\bonly (?:in"
                rf"|when|if|since)\b|\bindicates?\b|\btherefore\b|\bsince (?:the|its|it|this|no|all)\b|\black(?:s"
                rf"|ed|ing)?\b|\bexpired\b|\bran out\b|\bmissing\b|\bthe (?:flag|answer|result) is\b"
            ),
        ),
        (
            "decided",
            1.5,
            (
                rf"{_I} (?:decided|chose|opt(?:ed)?|went (?:for|with)|go(?:ing)? (?:for|with)|settled?"
                rf"|prefer(?:red)?|pick(?:ed)?)\b"
                r"|\b(?:decision|plan|approach|workaround)(?: is|:)|\binstead of\b|\brather than\b|\bin favou?r of\b"
            ),
        ),
        (
            "failed",
            1.5,
            (
                r"\bdid(?:n['\u2019]t| not) (?:help|work|change|fix|apply|pass|find|succeed)|\bno (?:difference"
                r"|effect|luck|change)\b|\bnot the (?:cause|problem|issue|culprit)\b"
                rf"|\bstill (?:fails?|failing|sees?|broken|returns?|wrong|the same)\b|\b(?:rolled|roll)"
                rf" .{{0,24}}back\b|\brevert\w*|\bundid\b|\bback out\b|\b(?:take|took) it out\b"
                rf"|\bdoes(?:n['\u2019]t| not) (?:work|exist|help|match)\b|{_I} (?:missed|forgot|was wrong|cannot"
                rf"|could not)\b|\b(?:not|n['\u2019]t) been applied\b|\bin vain\b"
            ),
        ),
        (
            "failed",
            0.9,
            (
                r"\b(?:fail(?:s|ed|ure|ing)|error|unable to|cannot|refus(?:es|ed)|incorrect|mistake|blocked|denied"
                r"|invalid)\b"
            ),
        ),
        (
            "done",
            1.0,
            (
                r"\b(?:is|are|was|were|has been|have been|['\u2019]s been) (?:now )?(?:successfully )?(?:fixed"
                r"|moved|booked|cancell?ed|updated|changed|refunded|created|added|removed|"
                r"deployed|applied|sent|opened|closed|merged|upgraded|completed?|renamed|installed|solved"
                r"|resolved|scheduled|transferred|confirmed|issued)\b"
                rf"|\bpasses\b|\btests? pass|\bdone[:.!]|\bsuccessful(?:ly)?\b|{_I} (?:fixed|moved|booked"
                rf"|cancell?ed|updated|changed|refunded|created|added|removed|deployed|"
                r"applied|sent|opened|closed|merged|raised|lowered|renamed|installed|wrote|implemented|replaced|set)\b"
            ),
        ),
        (
            "next",
            1.3,
            (
                r"\bnext(?: steps?\b|[,:] | (?:i|we|is)\b)|\b(?:remain(?:s|ing)|to-?do|left to do|open (?:point"
                r"|question|issue|item)|outstanding|pending|waiting (?:for|on)|awaiting|follow[- ]up)\b"
                r"|\bstill (?:need|have|must|missing|to do|open)\b"
            ),
        ),
        ("next", 0.3, r"\b(?:need(?:s)? to|have to|i will|i['\u2019]ll|let['\u2019]?s|let me|we should|then i)\b"),
    )
)
_ASKS = re.compile(
    r"\?\s*\Z|\b(?:would you|could you|please (?:provide|confirm|let me)|let me know|feel free|shall i|do you)\b",
    re.IGNORECASE,
)
_ANNOUNCES = re.compile(
    r"(?:(?:ok(?:ay)?|now|so|first|then|next|alright|great|sure|good|to \w+ \w+ \w+),? )*"
    r"(?:let me|let['\u2019]?s|i['\u2019]ll|i will|i am going|i['\u2019]m going|we (?:will|can|should)|i (?:can"
    r"|should|want))\b",
    re.IGNORECASE,
)
_EMPTY_WORDS = (
    "found find cause bug problem issue reason done fixed works working passes pass fails failed checked next "
    "your have has here there seems however unfortunately successfully been information details several following "
    "assistance further feel free help anything else need needed happy fix correct wrong decided right again "
    "still after before because since "
)
_EMPTY = frozenset(_EMPTY_WORDS.split())
"""Words with which a conclusion says that there is one and not which."""
_NUMBERED = re.compile(r"\A(?:\d{1,3}[.)]|[-*•])\s")


class Conclusion(NamedTuple):
    """A sentence of the assistant (or an error line of a tool) with what it is and how much it tells."""

    label: str
    text: str
    weight: float
    keys: frozenset[str]


def conclusions(text: str) -> tuple[Conclusion, ...]:
    """What an assistant's message concludes, in order; long messages of explanation conclude little."""
    if not text.strip():
        return ()
    said = sentences(text[:20_000], longest=LONGEST)
    spread = 1.0 if len(said) <= 8 else (8 / len(said)) ** 0.5
    found: list[Conclusion] = []
    for sentence in said:
        if (
            not 12 <= len(sentence) <= LONGEST
            or not is_prose(sentence)
            or (_NUMBERED.match(sentence) and len(said) > 4)
        ):
            continue
        label, weight = _judge(sentence)
        if not label and len(sentence) >= SHORTEST_NOTE and not _ANNOUNCES.match(sentence):
            label, weight = "noted", WEAKEST
        if EMPHASIS.search(sentence):
            label, weight = label or "important", weight + 2.0
        if weight < WEAKEST:
            continue
        mentions = scan(sentence)
        weight += min(0.6, 0.2 * sum(m.kind in STRONG or m.kind is Kind.QUANTITY for m in mentions))
        if _ASKS.search(sentence) or sentence.endswith(":"):
            weight *= 0.3
        elif _says_little(sentence, mentions):
            weight *= VAGUE
        if weight < LEAST and not EMPHASIS.search(sentence):
            continue
        keys = frozenset(m.value.lower() for m in mentions if m.kind in STRONG)
        found.append(Conclusion(label, sentence, weight * spread, keys))
    return tuple(sorted(sorted(found, key=lambda c: -c.weight)[:MOST], key=found.index))


def _says_little(sentence: str, mentions: Sequence[Mention]) -> bool:
    """Whether a sentence names nothing and has hardly a word that tells: "That is the bug."."""
    if mentions:
        return False
    return sum(w.lower() not in STOP and w.lower() not in _EMPTY and len(w) > 2 for w in WORD.findall(sentence)) < 2


def _judge(sentence: str) -> tuple[str, float]:
    """The label of the strongest cue and the sum of all, at most 3; no label and 0 without any."""
    best, label, total = 0.0, "", 0.0
    for name, weight, pattern in _CUES:
        if pattern.search(sentence):
            total += weight
            if weight > best:
                best, label = weight, name
    return label, min(3.0, total)


_NAMED_ERROR = re.compile(r"\b\w{0,40}(?:Error|Exception|FATAL|Errno)\b|\bfatal\b|\berror:", re.IGNORECASE)
_WORKED = re.compile(r"\b(?:0 (?:errors?|failed|failures)|no errors?)\b", re.IGNORECASE)


def open_error(text: str) -> Conclusion | None:
    """The line of a result that names its error best; None where it shows none."""
    if len(text) > 400_000 or not ERROR.search(text):
        return None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    named = [
        line
        for line in lines
        if len(line) > 4 and ERROR.search(line) and not _WORKED.search(line) and not is_code(line)
    ]
    if not named:
        return None
    best = next((line for line in reversed(named) if _NAMED_ERROR.search(line)), named[-1])
    best = best if len(best) <= 240 else f"{best[: best.rfind(' ', 120, 240)]}…"
    keys = frozenset(m.value.lower() for m in scan(best) if m.kind in STRONG)
    return Conclusion("error", best, 1.2 if _NAMED_ERROR.search(best) else 0.5, keys)
