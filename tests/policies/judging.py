"""A model in a test that answers the questions of an evaluation from what it is given, and a judge that can be fooled."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from policies.effects import Failed, Summarize, Summary
from policies.quality.fidelity import ANSWER, JUDGE

FENCED = re.compile(r"^<(weir-\d{6})> ([^\n]*)\n([\s\S]*?)\n</\1>$", re.MULTILINE)
NUMBERED = re.compile(r"^(\d{1,2}): (.*)$", re.MULTILINE)
GAP = "____"


def fenced(prompt: str) -> dict[str, str]:
    """What stands in each fence of a prompt, by its name."""
    return {match.group(2): match.group(3) for match in FENCED.finditer(prompt)}


def outside(prompt: str) -> str:
    """What stands in no fence: all that may give orders."""
    return FENCED.sub("", prompt)


def reader(effect: Summarize) -> Summary:
    """Answers by looking up: gaps are filled from the transcript, anything else gets the line that shares most words."""
    parts = fenced(effect.prompt)
    lines = parts["transcript"].split("\n")
    return Summary("\n".join(f"{n}: {_look_up(q, lines)}" for n, q in NUMBERED.findall(parts["questions"])))


def _look_up(question: str, lines: list[str]) -> str:
    quoted = re.search("\u00ab(.*?)\u00bb", question)
    if quoted and GAP in quoted.group(1):
        before, _, after = quoted.group(1).partition(GAP)
        pattern = rf"{re.escape(before[-20:].strip())}\s*(\S+?)\s*{re.escape(after[:12].strip())}"
        found = [m.group(1) for line in lines if (m := re.search(pattern, line))]
        return found[-1] if found else "NOT STATED"
    wanted = set(re.findall(r"\w{4,}", question.lower())) - {"what", "which", "conversation", "this", "does"}
    ranked = sorted(lines, key=lambda line: -len(wanted & set(re.findall(r"\w{4,}", line.lower()))))
    return ranked[0][:200] if ranked and wanted & set(re.findall(r"\w{4,}", ranked[0].lower())) else "NOT STATED"


def strict_judge(effect: Summarize) -> Summary:
    """Yes where every word of answer A with a digit is in answer B."""
    parts = fenced(effect.prompt)
    literals = re.findall(r"\b\w*\d\w*\b", parts["answer A"])
    return Summary("yes" if all(value in parts["answer B"] for value in literals) else "no")


def gullible_judge(effect: Summarize) -> Summary:
    """Does what it is told outside of the fences, by whomever; else judges strictly."""
    orders = outside(effect.prompt).replace(JUDGE.instruction, "")
    return Summary("yes") if re.search(r"\byes\b", orders) else strict_judge(effect)


@dataclass
class Panel:
    """Answers each purpose by its own function."""

    answer: Callable[[Summarize], Summary | Failed] = reader
    judge: Callable[[Summarize], Summary | Failed] = strict_judge

    def __call__(self, effect: Summarize) -> Summary | Failed:
        by = {ANSWER.purpose: self.answer, JUDGE.purpose: self.judge}
        return by[effect.purpose](effect)
