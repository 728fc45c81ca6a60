"""The gate for prompts: a changed prompt is accepted only with a score, and only if that is good
enough.

``tests/policies/data/prompt_gate.json`` holds the digest of every prompt with the scores that it
was accepted with; a test fails where a digest is another one. ``python -m benchmarks.prompt_gate``
prints the scores of the prompts as they are, ``--accept`` writes them down, unless one is below its
threshold: then it exits 1 and writes nothing.

No model is asked. A scripted writer follows the instruction to the letter: it keeps the kinds of
things that the instruction names, copies identifiers only where it is told to, and stops where it
is told to. So a prompt that forgets the errors, the limit or the exact wording scores lower. What
real models make of a prompt says ``weir evaluate``.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from policies.effects import Answers, Failed, Flow, Reply, Summarize, Summary, Together
from policies.quality.coverage import Dimension, Question
from policies.quality.fidelity import ANSWER, JUDGE, AnswerVerdict, Fidelity, evaluate
from policies.quality.fidelity import PROMPTS as EVALUATING
from policies.summary.ask import Written, condense
from policies.summary.material import MaterialLine
from policies.summary.prompts import PROMPTS, Prompt
from policies.tokens import CHARS4

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "policies" / "data"
GATE = DATA / "prompt_gate.json"
SETS = ("canary_sessions", "wording", "wording_unseen")
SESSIONS = 6
MAX_TOKENS = 700
MAX_INPUT = 64_000
USABLE = 0.7
"""Least share of answers that may be used as they are."""
KEPT: Mapping[str, float] = {
    "structured": 0.70,
    "handoff": 0.65,
    "plain": 0.55,
    "tool_result": 0.55,
    "reading": 0.55,
    "level_1": 0.55,
    "level_2": 0.55,
    "notes": 0.55,
}
"""Least share of the facts that a prompt's answers hold; of titles and single sentences none is
asked.
"""
RIGHT = 1.0
"""Least share of right verdicts with the prompts of an evaluation."""
_FENCED = re.compile(r"^<(weir-\d{6})> ([^\n]*)\n([\s\S]*?)\n</\1>$", re.MULTILINE)
_LIMIT = re.compile(r"at most (\d{1,6}) words")
_IDENTIFIER = re.compile(r"[\w./:@#-]{0,40}\d[\w./:@#-]{0,40}|[\w.-]{1,40}(?:[/_][\w.-]{1,60})+")
_ASKED: Mapping[str, tuple[str, str]] = {
    "decisions": (r"\bdecision", r"\b(?:decid|chose|chosen|instead|because|will use|went with)"),
    "errors": (r"\berrors?\b", r"\b(?:\w*error|failed|failure|denied|refused|timeout|exception)\b"),
    "rules": (
        r"\b(?:constraints?|preferences|rules?)\b",
        r"\b(?:never|always|only|must|no more|please|not)\b",
    ),
    "state": (
        r"\b(?:done|under way|next steps?|progress|where it stands)\b",
        r"\b(?:done|next|now|todo|left)\b",
    ),
    "values": (r"\b(?:numbers|ids|values|data)\b", r"\d"),
    "paths": (r"\b(?:paths?|files)\b", r"\w[/_.]\w"),
}
"""What an instruction may ask for, the word that asks for it, and what tells a line that holds it.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """A prompt's digest and what its answers were worth: shares of usable ones, of facts kept, of
    right verdicts.
    """

    digest: str
    usable: float | None = None
    kept: float | None = None
    right: float | None = None

    def faults(self, name: str) -> Iterator[str]:
        """What is below its threshold."""
        for label, value, least in (
            ("usable answers", self.usable, USABLE),
            ("facts kept", self.kept, KEPT.get(name, 0.0)),
            ("right verdicts", self.right, RIGHT),
        ):
            if value is not None and value < least:
                yield f"{name}: {label} {value:.3f}, at least {least:g} are asked"


def follow(effect: Summarize) -> Summary:
    """The notes of somebody who does what the instruction says, and no more."""
    instruction = _FENCED.sub("", effect.prompt)
    material = "\n".join(
        m.group(3) for m in _FENCED.finditer(effect.prompt) if m.group(2) != "task"
    )
    limits = [int(words) for words in _LIMIT.findall(instruction)]
    wanted = [
        re.compile(tells, re.IGNORECASE)
        for asks, tells in _ASKED.values()
        if re.search(asks, instruction)
    ]
    copies = re.search(r"exactly as they are written|exact (?:names|text)", instruction) is not None
    lines = [re.sub(r"^\[[^\]]{0,80}\] ?", "", raw).strip() for raw in material.splitlines()]
    ranked = sorted(
        dict.fromkeys(filter(None, lines)),
        key=lambda line: -sum(bool(w.search(line)) for w in wanted),
    )
    room = min(limits, default=10**6)
    said: list[str] = []
    for line in ranked:
        shown = line if copies else _IDENTIFIER.sub("some value", line)
        words = shown.split()[: min(60, room)]
        if not words:
            break
        room -= len(words) + 1
        said.append(" ".join(words))
    if "category | importance | text" in instruction:
        return Summary("\n".join(f"learnings | high | {line}" for line in said))
    if "title alone" in instruction:
        return Summary(said[0] if said else "")
    heading = "Goal: " if re.search(r"^Goal:", instruction, re.MULTILINE) else ""
    return Summary(heading + "\n- ".join(said))


def _run(flow: Flow[object], answer: Callable[[Summarize], Summary | Failed]) -> object:
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            return end.value
        if isinstance(asked, Together):
            reply = Answers(tuple(map(answer, asked.effects)))
        else:
            reply = answer(asked) if isinstance(asked, Summarize) else Failed("not_here")


def sessions() -> list[tuple[list[MaterialLine], list[str]]]:
    """The shipped sessions as who said what, each with the values that it needs later."""
    found = []
    for name in SETS:
        for row in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:SESSIONS]:
            value = json.loads(row)
            lines = [
                MaterialLine(m["role"], m["content"]) for m in value["messages"] if m.get("content")
            ]
            text = "\n".join(line.text for line in lines).lower()
            facts = value.get("meta", {}).get("facts", ())
            needles = [str(n) for f in facts for n in (f.get("needles") or [f.get("value", "")])]
            found.append((lines, [n for n in needles if n and n.lower() in text]))
    return found


def measure(prompt: Prompt) -> Score:
    """What the answers to a summariser's prompt are worth on the shipped sessions."""
    usable = kept = wanted = 0
    held = sessions()
    for lines, facts in held:
        written, said = _written(prompt, lines)
        usable += bool(written.text)
        wanted += len(facts)
        kept += sum(fact.lower() in said for fact in facts)
    return Score(
        prompt.digest, usable=round(usable / len(held), 4), kept=round(kept / max(1, wanted), 4)
    )


def _written(prompt: Prompt, lines: Sequence[MaterialLine]) -> tuple[Written, str]:
    """What comes of a session under a prompt, which need not be the one in force, and what the
    writer said last.

    What was said is what the prompt is worth: code puts the sources' words in the place of a
    note's.
    """
    known = PROMPTS[prompt.name]
    said = [""]

    def answer(effect: Summarize) -> Summary:
        instruction = known.ask(max_tokens=1)[:30]
        at = effect.prompt.rfind(instruction) if prompt is not known else -1
        asked = (
            effect.prompt
            if at < 0
            else effect.prompt[:at] + prompt.ask(max_tokens=effect.max_tokens)
        )
        reply = follow(Summarize(prompt.system, asked, effect.max_tokens, effect.purpose))
        said.append(reply.text)
        return reply

    flow = condense(
        lines,
        prompt=prompt.name,
        max_tokens=MAX_TOKENS,
        max_input=MAX_INPUT,
        counter=CHARS4,
        task="Find what matters.",
    )
    result = _run(flow, answer)
    assert isinstance(result, Written)
    return result, said[-1].lower() if result.text else ""


_ASK = Question("Which port does the service use?", Dimension.FACTS)
_PAIRS: tuple[tuple[str, str, AnswerVerdict], ...] = (
    (
        "The service uses port 8123.",
        "In short: the service uses port 8123, as agreed.",
        AnswerVerdict.YES,
    ),
    ("The service uses port 8123.", "The service uses port 9000.", AnswerVerdict.NO),
    ("The service uses port 8123.", "We talked about the weather.", AnswerVerdict.NO),
    ("We talked about the weather.", "The service uses port 9000.", AnswerVerdict.UNKNOWN),
)


def measure_evaluation(changed: Mapping[str, Prompt] | None = None) -> float:
    """The share of right verdicts that followers of the evaluation's prompts (some of them
    ``changed``) come to.
    """
    prompts = {**EVALUATING, **(changed or {})}

    def answer(effect: Summarize) -> Summary:
        instruction = prompts[effect.purpose.rpartition("-")[0]].instruction
        parts = {m.group(2): m.group(3) for m in _FENCED.finditer(effect.prompt)}
        if effect.purpose == JUDGE.purpose:
            same = re.findall(r"\d+", parts["answer A"]) == re.findall(r"\d+", parts["answer B"])
            strict = (
                "exactly one word: yes, no or unknown" in instruction
                and "does matter" in instruction
            )
            return Summary(
                ("yes" if same else "no") if strict else "I would say that they are much alike: yes"
            )
        line = next((line for line in parts["transcript"].splitlines() if "port" in line), "")
        nothing = "NOT STATED" if "NOT STATED" in instruction else "They use port 80, I think."
        numbered = "1: " if "its number, a colon" in instruction else "Well, "
        return Summary(numbered + (line or nothing))

    right = 0
    for whole, less, verdict in _PAIRS:
        lines = [[MaterialLine("user", text)] for text in (whole, less)]
        flow = evaluate(*lines, questions=[_ASK], counter=CHARS4, max_input=8_000)
        found = _run(flow, answer)
        assert isinstance(found, Fidelity)
        right += [judged.verdict for judged in found.judged] == [verdict]
    return right / len(_PAIRS)


def scores(changed: Mapping[str, Prompt] | None = None) -> dict[str, Score]:
    """Every prompt with its digest and scores, by name; ``changed`` ones stand in place of those in
    force.
    """
    other = changed or {}
    found = {name: measure(other.get(name, prompt)) for name, prompt in PROMPTS.items()}
    right = measure_evaluation(
        {name: prompt for name, prompt in other.items() if name in EVALUATING}
    )
    for name, prompt in {
        **EVALUATING,
        **{n: p for n, p in other.items() if n in EVALUATING},
    }.items():
        found[name] = Score(
            prompt.digest, right=right if name in (ANSWER.name, JUDGE.name) else None
        )
    return found


def digests() -> dict[str, str]:
    """The digest of every prompt in force, by name."""
    return {prompt.name: prompt.digest for prompt in (*PROMPTS.values(), *EVALUATING.values())}


def accepted() -> dict[str, Score]:
    """What the gate's file holds, by name."""
    return {
        name: Score(**row) for name, row in json.loads(GATE.read_text(encoding="utf-8")).items()
    }


def main(
    arguments: Sequence[str] | None = None, *, changed: Mapping[str, Prompt] | None = None
) -> int:
    """Print the scores; with ``--accept`` write them down, or exit 1 where one is below its
    threshold.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--accept", action="store_true", help="renew tests/policies/data/prompt_gate.json"
    )
    parser.add_argument("--gate", type=Path, default=GATE, help="another file to renew")
    options = parser.parse_args(arguments)
    found = scores(changed)
    for name, score in found.items():
        values = ", ".join(f"{k} {v:.3f}" for k, v in asdict(score).items() if isinstance(v, float))
        print(f"{name:20} {score.digest}  {values}")
    faults = [text for name, score in found.items() for text in score.faults(name)]
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    if faults:
        return 1
    if options.accept:
        rows = {
            name: {k: v for k, v in asdict(score).items() if v is not None}
            for name, score in found.items()
        }
        options.gate.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
