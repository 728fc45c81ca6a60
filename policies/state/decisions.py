"""Decisions in a sentence: what was decided, for which reason, and what was decided against.

The parts are cut out of the sentence letter by letter: "I went with leases instead of locks because workers crash".
"""

import re

from policies.checkpoint import Decision

SHORTEST = 8
"""Characters that have to be left of what was decided, else the sentence stays whole."""
_WE = r"\b(?:i|we)(?:['\u2019](?:ve|ll|d|re|m))?(?: have| had| am| are| will)?(?: now| therefore| also)?"
_DECIDES = re.compile(
    rf"{_WE} (?:decided?|chose|choose|opt(?:ed)?|went (?:for|with)|go(?:ing)? (?:for|with)|settled?|prefer(?:red)?"
    r"|pick(?:ed)?|use|using|keep|keeping|switch(?:ed|ing)?|stick(?:ing)? (?:to|with))\b"
    r"|\bdecision\b|\blet['\u2019]?s (?:go with|use|keep|stick)\b|\b(?:plan|approach|workaround)(?: is\b|:)",
    re.IGNORECASE,
)
_BY_USER = re.compile(
    r"\A(?:decision|decided|agreed)\b\s*:|\b(?:i|we)(?:['\u2019]ve| have)? (?:decided|chose|agreed|settled)\b"
    r"|\blet['\u2019]?s (?:go with|use|keep|stick)\b",
    re.IGNORECASE,
)
_FIRST_WHY = re.compile(r"\A(?:because|since|as) (.{4,200}?), (?=\S)", re.IGNORECASE)
_WHY = re.compile(
    r"[,;]?\s+\(?(?:because(?: of)?|since|due to|so that|in order to|as (?=it|they|the|this))\s+"
    r"([^;)]{3,300}?)\)?(?=[.!;]?\Z|;)",
    re.IGNORECASE,
)
_AGAINST = re.compile(
    r"[,;]?\s+\(?(?:instead of|rather than|in place of)\s+([^,;()]{2,120}?)\)?(?=[,;.!]|\Z| because | since | so that )"
    r"|[,;]\s+not\s+([^,;()]{2,80}?)(?=[,;.!]|\Z)"
    r"|(?<=\w)\s+over\s+([^,;()]{2,80}?)(?=[,;.!]|\Z| because | since )",
    re.IGNORECASE,
)
_CHOOSES = re.compile(r"\b(?:chose|chosen|prefer(?:red)?|pick(?:ed)?|favou?r(?:ed)?)\b", re.IGNORECASE)


def decides(text: str, *, by_user: bool = False) -> bool:
    """Whether a sentence says that something was decided; of the user only in so many words."""
    return bool((_BY_USER if by_user else _DECIDES).search(text))


def decision_of(sentence: str) -> Decision:
    """The decision in a sentence, its reason and its alternatives cut out where the rest still says what."""
    against: list[str] = []
    text, why = sentence.strip(), ""
    for pattern in (_FIRST_WHY, _WHY):
        match = pattern.search(text)
        rest = f"{text[: match.start()]}{text[match.end() :]}".strip() if match else ""
        if match and len(rest) >= SHORTEST:
            text, why = rest, match.group(1).strip().rstrip(".")
            break
    for match in reversed([*_AGAINST.finditer(text)]):
        rest = f"{text[: match.start()]}{text[match.end() :]}".strip()
        if len(rest) < SHORTEST or (match.group(3) and not _CHOOSES.search(text)):
            continue
        text = rest
        against.insert(0, next(g for g in match.groups() if g).strip())
    return Decision(text, why, tuple(against))
