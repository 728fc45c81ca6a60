"""What a judge's reply says, read strictly, and what many verdicts come to.

A reply is one of three words or it is unknown: no word is looked for inside a longer text, and ``not yes`` is no.
What is unknown counts neither for nor against, and how often that was is part of the result.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from policies.effects import Failed, Reply, Summary
from policies.fidelity.questions import Dimension, Question

MAX_READ_LEN = 4_000
_THOUGHT = re.compile(r"\A\s*<think(?:ing)?>[\s\S]{0,200000}?</think(?:ing)?>", re.IGNORECASE)
_WORD = re.compile(r"(?:not\s{1,3}yes|yes|no|unknown)(?![\w'\u2019-])")
_EDGES = " \t\r\n\"'`*_.,:;!#>(){}[]\u201c\u201d\u2018\u2019"
_BOTH = re.compile(r"\A(?:yes|no|unknown)\s{0,3}(?:[/|,]|\bor\b|\band\b|\bbut\b|-)?\s{0,3}(?:yes|no|unknown)\b")


class AnswerVerdict(StrEnum):
    """Whether the compacted context answers as the whole one does."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


def read_verdict(reply: Reply) -> tuple[AnswerVerdict, str]:
    """The verdict of a judge's reply, and for an unknown one why: its code, ``unreadable`` or ``undecided``."""
    if isinstance(reply, Failed):
        return AnswerVerdict.UNKNOWN, reply.reason
    if not isinstance(reply, Summary) or reply.tool_calls:
        return AnswerVerdict.UNKNOWN, "unreadable"
    text = _THOUGHT.sub("", reply.text, count=1)[:MAX_READ_LEN].strip().lower()
    if (document := text.strip("` \n").removeprefix("json").lstrip()).startswith("{"):
        return _in_json(document)
    said = text.lstrip(_EDGES)
    word = _WORD.match(said)
    if word is None or _BOTH.match(said):
        return AnswerVerdict.UNKNOWN, "unreadable"
    return _of_word(word.group())


def _in_json(text: str) -> tuple[AnswerVerdict, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return AnswerVerdict.UNKNOWN, "unreadable"
    said = value.get("verdict") if isinstance(value, dict) else None
    return _of_word(said.strip()) if isinstance(said, str) else (AnswerVerdict.UNKNOWN, "unreadable")


def _of_word(word: str) -> tuple[AnswerVerdict, str]:
    try:
        verdict = AnswerVerdict.NO if word.split() == ["not", "yes"] else AnswerVerdict(word)
    except ValueError:
        return AnswerVerdict.UNKNOWN, "unreadable"
    return verdict, "undecided" if verdict is AnswerVerdict.UNKNOWN else ""


@dataclass(frozen=True, slots=True)
class Judged:
    """One question with both answers and the verdict; ``why`` says what decided it where no judge did."""

    question: Question
    original: str
    compacted: str
    verdict: AnswerVerdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The verdicts on one compaction; a score is consistent over consistent and inconsistent, None of none.

    ``calls`` counts the questions that were put to a model, ``failure`` says why nothing was asked.
    """

    judged: tuple[Judged, ...] = ()
    calls: int = 0
    failure: str = ""

    def __add__(self, other: "Fidelity") -> "Fidelity":
        return Fidelity((*self.judged, *other.judged), self.calls + other.calls, self.failure or other.failure)

    def count(self, verdict: AnswerVerdict, dimension: Dimension | None = None) -> int:
        """How many questions, of one dimension or of all, got that verdict."""
        return sum(j.verdict is verdict and dimension in (None, j.question.dimension) for j in self.judged)

    def score(self, dimension: Dimension | None = None) -> float | None:
        """The share of consistent answers among those that were judged; None of none: that is no success."""
        kept = self.count(AnswerVerdict.YES, dimension)
        judged = kept + self.count(AnswerVerdict.NO, dimension)
        return kept / judged if judged else None

    @property
    def unknown(self) -> dict[str, int]:
        """Why questions were not decided, and how many for each reason."""
        return dict(Counter(j.why for j in self.judged if j.verdict is AnswerVerdict.UNKNOWN))
