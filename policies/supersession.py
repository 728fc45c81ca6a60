"""Which statement of the user replaces which: same subject, another value, or an announced change."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from policies.identifiers import STRONG, Kind
from policies.rules import CHANGE, RULE_THRESHOLD, STOP, WORD, Sentence

_NEGATIVE = re.compile(r"\b(?:no|not|never|don['\u2019]?t|cannot|without|avoid|mustn['\u2019]?t)\b", re.IGNORECASE)
ATTRIBUTES: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "money": "budget cap capped spend spending cost costs expense expenses ceiling price limit dollars euros",
        "date": "deadline date due ship ships shipping schedule scheduled timing",
        "codename": "codename code-name named called calling label designated designation alias",
        "timezone": "timezone time-zone times timestamp timestamps clock clocks utc pacific gmt",
        "owner": "on-call oncall owner owns pager rotation duty escalation assignee",
        "approver": "approver approve approves approval approving",
        "branch": "branch branches rebased",
        "commit": "commit revision",
        "phase": "phase stage milestone progress",
        "next": "next",
        "style": "style tone answers answer replies reply responses response",
        "secret": "code password passcode vault",
        "region": "region zone hosted",
        "address": "url endpoint host address lives",
        "language": "language languages examples",
        "report": "weekly report",
        "tool": "tool purge",
        "version": "version",
    }.items()
}


@dataclass(frozen=True, slots=True)
class _Frame:
    words: frozenset[str]
    values: frozenset[str]
    attributes: frozenset[str]
    changes: bool
    negative: bool


def _stem(word: str) -> str:
    word = word.lower().replace("\u2019", "'").removesuffix("'s")
    for suffix in ("ing", "ed", "es", "s"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 4:
            return word[: -len(suffix)]
    return word


def _frame(sentence: Sentence) -> _Frame:
    body = sentence.text.partition(":")[2] if sentence.label else sentence.text
    first = len(sentence.text) - len(body) + 1
    kinds = STRONG | {Kind.QUANTITY, Kind.NUMBER}
    values = frozenset(
        m.value.lower() for m in sentence.mentions if m.kind in kinds or (m.kind is Kind.NAME and m.start > first)
    )
    parts = frozenset(p for v in values for p in re.findall(r"[a-z'-]+", v))
    raw = [w.lower() for w in WORD.findall(body)]
    words = frozenset(_stem(w) for w in raw if w not in STOP and w not in parts)
    attributes = frozenset(name for name, known in ATTRIBUTES.items() if known.intersection(raw))
    return _Frame(words, values, attributes, bool(CHANGE.search(sentence.text)), bool(_NEGATIVE.search(body)))


@dataclass(frozen=True, slots=True)
class Successor:
    """The index of the statement that replaces another, and whether it surely does."""

    index: int
    sure: bool


def superseded(statements: Sequence[Sentence]) -> dict[int, Successor]:
    """Indices of statements that a later one replaces, each with its newest successor.

    A later statement replaces an earlier one when both say the same thing about the same subject with another
    value, or when it announces a change of an attribute (date, amount, owner, …) of the same subject. Two
    prohibitions that differ in one word may both stand, so such pairs are only "probably".
    """
    frames = [_frame(s) for s in statements]
    frequency = Counter(word for frame in frames for word in frame.words)
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    gone: dict[int, Successor] = {}
    for index, frame in enumerate(frames):
        keys = sorted({*(w for w in frame.words if frequency[w] <= 12), *(f"@{a}" for a in frame.attributes)})
        for older in sorted({j for key in keys for j in by_key[key][-NEAREST:]}):
            verdict = _replaces(frames[older], frame, pair=(statements[older], statements[index]), frequency=frequency)
            if verdict is not None:
                sure = verdict or (older in gone and gone[older].sure)
                gone[older] = Successor(index, sure)
        for key in keys:
            by_key[key].append(index)
    return gone


def _replaces(old: _Frame, new: _Frame, *, pair: tuple[Sentence, Sentence], frequency: Counter[str]) -> bool | None:
    labelled = bool(pair[0].label) and pair[0].label == pair[1].label
    rules = pair[0].rule >= RULE_THRESHOLD and pair[1].rule >= RULE_THRESHOLD
    shared = old.words & new.words
    only_old, only_new = old.words - new.words, new.words - old.words
    attributes = old.attributes & new.attributes
    differs = bool(old.values and new.values and not (old.values & new.values))
    attribute_words = {_stem(w) for a in attributes for w in ATTRIBUTES[a]}
    if differs and shared and not ((only_old | only_new) - attribute_words) and len(shared) >= 1:
        return not (old.negative and new.negative) or new.changes
    if new.changes and attributes:
        scopes_old, scopes_new = old.words - attribute_words, new.words - attribute_words
        common = scopes_old & scopes_new
        if old.values & new.values:
            return None
        single = attributes & (_SINGULAR if differs else {"style"})
        if common or (single and not _distinct(only_old, only_new)):
            return True
    if _distinct(only_old, only_new) or not shared or pair[0].label != pair[1].label:
        return None
    rare = sum(1 for w in shared if frequency[w] <= 4)
    if labelled:
        return False if rare >= 2 or len(shared) >= 3 or (attributes and differs) else None
    share = len(shared) / max(1, min(len(old.words), len(new.words)))
    if not rules and rare >= 2 and share >= 0.3 and (differs or len(only_old) == len(only_new) == 1):
        return False
    return None


NEAREST = 6
"""How many earlier statements with the same word are looked at."""
_SINGULAR = frozenset({"codename", "timezone", "owner", "branch", "style", "phase"})
_CONTRASTS: tuple[frozenset[str], ...] = tuple(
    frozenset(_stem(w) for w in words.split())
    for words in (
        "production staging development test testing qa sandbox local",
        "primary secondary backup replica fallback main",
        "unit integration smoke acceptance functional",
        "travel trip project conference marketing hardware launch documentation docs product release design team",
        "morning afternoon evening night weekly daily monthly",
        "source target input output read write client server frontend backend",
        "home work office mobile billing shipping",
    )
)


def _distinct(only_old: frozenset[str], only_new: frozenset[str]) -> bool:
    """True where the two differ in words that set subjects apart (production and staging, unit and integration)."""
    return any(group & only_old and group & only_new for group in _CONTRASTS)
