"""What is asked about a conversation: four questions in any case, and more that code makes of what was said in it.

A question that code makes names what it is about and leaves out what it asks for: the value of a rule is a gap, the
values of a tool's argument are asked for by the argument's name. Text of the conversation in a question is made
harmless and stands between quotation marks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.checkpoint import Checkpoint
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.state import read_state
from policies.summary import harmless
from policies.text.gist import shorten
from policies.text.literals import literals
from policies.text.segments import Source, parse, sentences, structured

MIN_QUESTIONS, MAX_QUESTIONS = 4, 20
MAX_QUOTE_LEN = 240
MAX_VALUE_LEN = 120
MIN_VALUE_LEN = 4
MAX_VALUES = 4
MAX_CALLS = 400
BEGINNING = 12
"""Characters of a sentence by which it is asked for."""
GAP = "____"


class Dimension(StrEnum):
    """What a question tests."""

    FACTS = "key_facts"
    STATE = "state"
    DECISIONS = "decisions"


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``origin`` says what it was made of, ``expected`` are values that its answer is known to hold."""

    text: str
    dimension: Dimension
    origin: str
    expected: tuple[str, ...] = ()


MINIMUM = (
    Question("What is the goal of this conversation: what does the user want done?", Dimension.STATE, "minimum"),
    Question("Which step is being worked on at the end, and what is to be done next?", Dimension.STATE, "minimum"),
    Question("Which decisions were made, and why?", Dimension.DECISIONS, "minimum"),
    Question("What blocks the work or is unsolved at the end: errors, open problems, missing answers?",
             Dimension.STATE, "minimum"),
)  # fmt: skip
"""The questions of every evaluation: goal, current step, decisions, blockers."""


def questions_for(
    sources: Sequence[Source],
    *,
    count: int,
    later: Sequence[ToolCall] = (),
    recorded: Sequence[str] = (),
    tools: NoteTaking,
) -> tuple[Question, ...]:
    """At most ``count`` questions (4 to 20) about a conversation, the most telling of each kind first.

    ``later`` are calls that the conversation goes on to make, ``recorded`` values that it is known to need.
    """
    state = read_state(sources, goal="", tools=tools)
    kinds = (
        _recorded(sources, recorded),
        _arguments(sources, later),
        _rules(state),
        _decisions(state),
        _statuses(state),
        _issues(state),
    )
    found = dict.fromkeys(MINIMUM)
    texts = {q.text.lower() for q in MINIMUM}
    for question in _in_turns(kinds):
        if len(found) >= min(max(count, MIN_QUESTIONS), MAX_QUESTIONS):
            break
        if question.text.lower() not in texts:
            texts.add(question.text.lower())
            found[question] = None
    return tuple(found)


def proposed(text: str) -> Iterator[Question]:
    """The questions in a model's reply: lines that end in a question mark."""
    for line in text.splitlines():
        said = harmless(line).strip().lstrip("-*0123456789.) \t")
        if said.endswith("?") and 10 < len(said) <= MAX_QUOTE_LEN:
            yield Question(said, _dimension(said), "model")


def _dimension(text: str) -> Dimension:
    """What a question tests that a model wrote as it was asked to: in English."""
    low = text.lower()
    if any(word in low for word in ("decid", "decision", "chosen", "choose", "why ")):
        return Dimension.DECISIONS
    if any(word in low for word in ("status", "done", "step", "progress", "next", "open", "blocked")):
        return Dimension.STATE
    return Dimension.FACTS


def _in_turns(kinds: Iterable[Iterator[Question]]) -> Iterator[Question]:
    """One of each kind after another, until none has any left."""
    waiting = list(kinds)
    while waiting:
        left = []
        for kind in waiting:
            question = next(kind, None)
            if question is not None:
                yield question
                left.append(kind)
        waiting = left


def _recorded(sources: Sequence[Source], values: Sequence[str]) -> Iterator[Question]:
    """Gaps in the sentences that hold a value which the conversation is known to need."""
    for value in dict.fromkeys(values):
        sentence = next((s for source in sources for s in _sentences(source) if value in s), None)
        if sentence is not None and len(sentence) > len(value) + 8:
            yield _gap(sentence, value, Dimension.FACTS, "recorded")


def _sentences(source: Source) -> tuple[str, ...]:
    if source.is_result or source.role not in {"user", "assistant"}:
        return ()
    return tuple(s for s in sentences(source.text) if len(s) <= MAX_QUOTE_LEN)


def used_values(sources: Sequence[Source], later: Sequence[ToolCall] = ()) -> dict[tuple[str, str], list[str]]:
    """Values that a call took from an earlier message, by the names of tool and argument, the newest call first."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    end = max((s.position for s in sources), default=0) + 1
    made = [(s.position, call) for s in sources for call in s.calls]
    said = [(s.position, s.text) for s in sources]
    for position, call in reversed([*made, *((end, call) for call in later)][-MAX_CALLS:]):
        document = parse(call.arguments)
        for value, _, key, _ in structured(document) if document is not None else ():
            if not key.strip() or not MIN_VALUE_LEN <= len(value) <= MAX_VALUE_LEN or not _names(value):
                continue
            if any(value in text for at, text in said if at < position):
                found.setdefault((call.name, key), {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _names(value: str) -> bool:
    """Whether a value is for the most part a literal."""
    return 2 * max(map(len, literals(value)), default=0) >= len(value)


def _arguments(sources: Sequence[Source], later: Sequence[ToolCall]) -> Iterator[Question]:
    for (tool, key), values in used_values(sources, later).items():
        text = f"Which {_quoted(key)} did the conversation name that the tool {_quoted(tool)} needs? Name each of them."
        yield Question(text, Dimension.FACTS, "identifier", tuple(values[:MAX_VALUES]))


def _rules(state: Checkpoint) -> Iterator[Question]:
    for rule in reversed(state.constraints):
        yield _about(rule, Dimension.FACTS, "constraint", "What did the user say in full in the words that begin with")


def _decisions(state: Checkpoint) -> Iterator[Question]:
    for decision in reversed(state.decisions):
        if decision.rationale:
            text = f"Why was this decided: {_quoted(decision.text)}?"
            yield Question(text, Dimension.DECISIONS, "decision", literals(decision.rationale)[:MAX_VALUES])
        else:
            yield _about(
                decision.text, Dimension.DECISIONS, "decision", "What was decided in the words that begin with"
            )


def _about(said: str, dimension: Dimension, origin: str, asking: str) -> Question:
    """A question for the value that a sentence names, else for how it goes on."""
    value = max(literals(said), key=len, default="")
    if value and len(said) <= MAX_QUOTE_LEN and value != said:
        return _gap(said, value, dimension, origin)
    return Question(f"{asking} {_quoted(shorten(said, max(BEGINNING, len(said) // 3)))}?", dimension, origin)


def _statuses(state: Checkpoint) -> Iterator[Question]:
    for task in reversed(state.subtasks):
        text = f"How far is this: {_quoted(task.text)}? Done, in progress, or still to do?"
        yield Question(text, Dimension.STATE, "status")


def _issues(state: Checkpoint) -> Iterator[Question]:
    for issue in reversed(state.open_issues):
        yield Question(f"Is this solved or still open: {_quoted(issue)}?", Dimension.STATE, "issue")


def _gap(sentence: str, value: str, dimension: Dimension, origin: str) -> Question:
    shown = sentence.replace(value, GAP)
    return Question(f"What stands in the gap: {_quoted(shown)}?", dimension, origin, (value,))


def _quoted(text: str) -> str:
    return f"\u00ab{shorten(' '.join(harmless(text).split()), MAX_QUOTE_LEN)}\u00bb"
