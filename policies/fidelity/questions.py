"""What is asked about a conversation: four questions in any case, and more that code makes of what was said in it.

A question that code makes names what it is about and leaves out what it asks for: the value of a rule is a gap, the
values of a tool's argument are asked for by the argument's name. Text of the conversation in a question is made
harmless and stands between quotation marks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.checkpoint import Checkpoint, Decision
from policies.extraction.findings import leaves, parse, shorten
from policies.extraction.identifiers import STRONG, WEIGHTS, Mention, scan
from policies.extraction.readings import Source
from policies.extraction.rules import read_sentence, statements
from policies.extraction.supersession import superseded
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.state import read_state
from policies.summary import harmless

FEWEST, MOST = 4, 20
LONGEST_QUOTE = 240
LONGEST_VALUE = 120
SHORTEST_VALUE = 4
MOST_VALUES = 4
MOST_CALLS = 400
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
        _changes(sources),
        _issues(state),
    )
    found = dict.fromkeys(MINIMUM)
    texts = {q.text.lower() for q in MINIMUM}
    for question in _in_turns(kinds):
        if len(found) >= min(max(count, FEWEST), MOST):
            break
        if question.text.lower() not in texts:
            texts.add(question.text.lower())
            found[question] = None
    return tuple(found)


def proposed(text: str) -> Iterator[Question]:
    """The questions in a model's reply: lines that end in a question mark."""
    for line in text.splitlines():
        said = harmless(line).strip().lstrip("-*0123456789.) \t")
        if said.endswith("?") and 10 < len(said) <= LONGEST_QUOTE:
            yield Question(said, _dimension(said), "model")


def _dimension(text: str) -> Dimension:
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
    return tuple(s for s in statements(source.text) if len(s) <= LONGEST_QUOTE)


def used_values(sources: Sequence[Source], later: Sequence[ToolCall] = ()) -> dict[tuple[str, str], list[str]]:
    """Values that a call took from an earlier message, by the names of tool and argument, the newest call first."""
    found: dict[tuple[str, str], list[str]] = {}
    end = max((s.position for s in sources), default=0) + 1
    made = [(s.position, call) for s in sources for call in s.calls]
    said = [(s.position, s.text) for s in sources]
    for position, call in reversed([*made, *((end, call) for call in later)][-MOST_CALLS:]):
        document = parse(call.arguments)
        for leaf in leaves(document) if document is not None else ():
            value = leaf.value.strip()
            if not leaf.key or not SHORTEST_VALUE <= len(value) <= LONGEST_VALUE or not _is_identifier(value):
                continue
            if any(value in text for at, text in said if at < position):
                values = found.setdefault((call.name, leaf.key), [])
                if value not in values:
                    values.append(value)
    return found


def _is_identifier(value: str) -> bool:
    return any(m.kind in STRONG and len(m.value) * 2 >= len(value) for m in scan(value))


def _arguments(sources: Sequence[Source], later: Sequence[ToolCall]) -> Iterator[Question]:
    for (tool, key), values in used_values(sources, later).items():
        text = f"Which {_quoted(key)} did the conversation name that the tool {_quoted(tool)} needs? Name each of them."
        yield Question(text, Dimension.FACTS, "identifier", tuple(values[:MOST_VALUES]))


def _rules(state: Checkpoint) -> Iterator[Question]:
    for rule in reversed(state.constraints):
        mention = _strongest(scan(rule))
        if mention is not None and len(rule) <= LONGEST_QUOTE:
            yield _gap(rule, mention.value, Dimension.FACTS, "constraint")
        else:
            begin = " ".join(rule.split()[:5])
            text = f"What does the user's rule say in full that begins with {_quoted(begin)}?"
            yield Question(text, Dimension.FACTS, "constraint")


def _decisions(state: Checkpoint) -> Iterator[Question]:
    for decision in reversed(state.decisions):
        if decision.rationale:
            text = f"Why was this decided: {_quoted(decision.text)}?"
            yield Question(text, Dimension.DECISIONS, "decision", _strong(decision.rationale))
        elif (mention := _strongest(scan(decision.text))) is not None:
            yield _gap(decision.text, mention.value, Dimension.DECISIONS, "decision")
        else:
            yield _about(decision)


def _about(decision: Decision) -> Question:
    begin = " ".join(decision.text.split()[:4])
    return Question(f"What was decided in the words that begin with {_quoted(begin)}?", Dimension.DECISIONS, "decision")


def _statuses(state: Checkpoint) -> Iterator[Question]:
    for task in reversed(state.subtasks):
        text = f"How far is this: {_quoted(task.text)}? Done, in progress, or still to do?"
        yield Question(text, Dimension.STATE, "status")


def _issues(state: Checkpoint) -> Iterator[Question]:
    for issue in reversed(state.open_issues):
        yield Question(f"Is this solved or still open: {_quoted(issue)}?", Dimension.STATE, "issue")


def _changes(sources: Sequence[Source]) -> Iterator[Question]:
    """What the user said and replaced later: what holds now is asked for by what held before."""
    said = [
        read_sentence(text, index=0)
        for source in sources
        if source.role == "user" and not source.is_result
        for text in statements(source.text)
    ]
    for old, newer in sorted(superseded(said).items(), reverse=True):
        if not newer.sure or len(said[old].text) > LONGEST_QUOTE:
            continue
        before = said[old].literals
        fresh = tuple(m.value for m in said[newer.index].mentions if m.value.lower() not in before)
        text = f"The user said {_quoted(said[old].text)} and changed it later. What holds now?"
        yield Question(text, Dimension.FACTS, "superseded", fresh[:MOST_VALUES])


def _gap(sentence: str, value: str, dimension: Dimension, origin: str) -> Question:
    shown = sentence.replace(value, GAP)
    return Question(f"What stands in the gap: {_quoted(shown)}?", dimension, origin, (value,))


def _strongest(mentions: Sequence[Mention]) -> Mention | None:
    return max(mentions, key=lambda m: (WEIGHTS[m.kind], len(m.value)), default=None)


def _strong(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(m.value for m in scan(text) if m.kind in STRONG))[:MOST_VALUES]


def _quoted(text: str) -> str:
    return f"\u00ab{shorten(' '.join(harmless(text).split()), LONGEST_QUOTE)}\u00bb"
