"""The structured state of a task, read from messages by code as a delta on the last one, and what a model adds to it.

Code guards it: the user's rules stand word for word until the user surely replaced them, a status comes from a list
or a report, an error is the line that a tool printed. What a model proposes is taken only where every identifier in
it occurs in the source, and never in place of what code knows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from policies.checkpoint import Checkpoint, Decision, Status, Subtask
from policies.extraction.claims import Frame, frame
from policies.extraction.conclusions import Conclusion
from policies.extraction.findings import shorten
from policies.extraction.identifiers import STRONG, Kind
from policies.extraction.readings import Readings, Source, normal
from policies.extraction.rules import RULE_THRESHOLD, Sentence, read_sentence, statements
from policies.extraction.supersession import Successor, superseded
from policies.notes import notes_in
from policies.settings import NoteTaking
from policies.state.decisions import decides, decision_of
from policies.state.environment import MOST_FACTS, SAID, add, bare, environment, key_of
from policies.state.issues import open_issues
from policies.state.merging import MOST_DECISIONS, MOST_LEARNINGS, Proposal, merge_states
from policies.state.milestones import is_hedged
from policies.todos import bounded, calls_in, items_in_text, list_in_call, subtasks_of

__all__ = ["Proposal", "known_until", "merge_states", "read_state"]

MOST_NOTES = 10
LONGEST = 240
REPORT = 0.9
LONGEST_REPORT = 1_200
"""An answer of more characters explains something and reports nothing."""
MARKS = 4
_CRITERION = re.compile(
    r"\b(?:(?:done|finished|complete|successful|accepted) (?:when|once|if|as soon as)|must (?:all )?(?:pass|succeed)"
    r"|should (?:all )?pass|acceptance|success (?:criteri\w+|means)|definition of done|counts as done"
    r"|(?:all|the) tests (?:pass|are green)|expected (?:result|output|behaviou?r))\b",
    re.IGNORECASE,
)
_LESSON = re.compile(
    r"\b(?:root cause|caused by|turn(?:s|ed) out|culprit|lesson|note that|learned that|ruled out"
    r"|(?:that|this) is why|the (?:real |actual |main )?(?:cause|bug|problem|fault) (?:is|was|lies))\b",
    re.IGNORECASE,
)
_ASKS = re.compile(r"\?\s*\Z|\b(?:please (?:provide|confirm|let)|could you|would you|let me know)\b", re.IGNORECASE)
_STATED = re.compile(r"fact|goal|state|status|info|context|fyi|update|reminder|note")
_TELLS = re.compile(
    r"\b(?:my|our|the|we|i|it)\b[^.?!]{0,80}\b(?:is|are|was|were|use|uses|runs?|live|have|has|['\u2019](?:s|m|re))\b",
    re.IGNORECASE,
)
_POINTS_BACK = re.compile(r"\b(?:make|set|raise|lower|change) (?:it|that|them|this)\b", re.IGNORECASE)
_MEASURED = frozenset({Kind.NUMBER, Kind.QUANTITY, Kind.TIME})
_NESTED = re.compile(r"\[now \[now ([^\[\]]*)\]\]")


@dataclass(frozen=True, slots=True)
class _Said:
    """A user's sentence at its newest place; ``kept`` is as what a previous state holds it (``rule``, ``user``, …)."""

    position: int
    sentence: Sentence
    frame: Frame | None
    kept: frozenset[str] = frozenset()


def read_state(
    sources: Sequence[Source],
    *,
    goal: str,
    previous: Checkpoint | None = None,
    tools: NoteTaking,
    readings: Readings | None = None,
    later: Sequence[str] = (),
) -> Checkpoint:
    """The state of a task after these messages, as a delta on ``previous``; identifiers are not read here.

    Messages that ``previous`` has read already only add what it lacks: they never take back what came after them.
    ``later`` are texts of the user behind the sources: what they replace is stale already.
    """
    reader = Readings() if readings is None else readings
    base = previous or Checkpoint()
    until = known_until(sources, base.marks)
    old, new = [s for s in sources if s.position <= until], [s for s in sources if s.position > until]
    task = base.goal or goal or next((s.text for s in sources if s.role == "user" and not s.is_result), "")
    said = _statements(old, new, task="" if base.goal else task, base=base, readings=reader, later=later)
    stale = superseded([s.sentence for s in said], [s.frame for s in said])
    constraints, criteria, facts = _stated(said, stale)
    around = environment(new, reader, known=environment(old, reader) if not base.environment else base.environment)
    concluded = [(s, c) for s in sources if s.role == "assistant" and not s.is_result for c in reader.conclusions(s)]
    return base.advance(
        goal=task,
        constraints=constraints,
        success_criteria=criteria,
        subtasks=_subtasks(old, new, concluded, tools, base=base),
        decisions=_decisions(concluded, said, stale, base=base),
        open_issues=open_issues(new, reader, known=base.open_issues),
        environment=_with_facts(around, facts),
        learnings=_learnings(concluded, base=base),
        notes=_notes(sources, tools, base=base),
        marks=_marks(sources, base.marks, until=until),
    )


def known_until(sources: Sequence[Source], marks: Sequence[str]) -> int:
    """The highest position that a state with these marks has read; -1 where it read another history."""
    at = {s.position: s for s in sources}
    told = [(int(p), digest) for p, _, digest in (m.partition(":") for m in marks) if p.isdigit()]
    if not told:
        return -1
    agree = [p for p, digest in told if p in at and _digest(at[p]) == digest]
    differ = [p for p, digest in told if p in at and _digest(at[p]) != digest]
    if not agree:
        return -1
    last = max(p for p, _ in told)
    return last if not differ else max([p for p in agree if p < min(differ)], default=-1)


def _digest(source: Source) -> str:
    said = f"{source.role}\0{source.tool}\0{source.text}"
    return blake2b(said.encode(errors="replace"), digest_size=4).hexdigest()


def _marks(sources: Sequence[Source], marks: Sequence[str], *, until: int) -> tuple[str, ...]:
    """A few of the messages that have been read by now: the first ones, some between, and the newest last."""
    if not sources or (until >= 0 and sources[-1].position <= until):
        return tuple(marks)
    step = max(1, len(sources) // MARKS)
    chosen = {*range(min(MARKS, len(sources))), *range(0, len(sources), step)}
    chosen |= set(range(max(0, len(sources) - MARKS), len(sources)))
    own = {sources[i].position: f"{sources[i].position}:{_digest(sources[i])}" for i in chosen}
    kept = {int(m.partition(":")[0]): m for m in marks if until >= 0 and m.partition(":")[0].isdigit()}
    both = {p: m for p, m in kept.items() if p <= until} | own
    order = sorted(both)
    few = order if len(order) <= 4 * MARKS else [*order[: 2 * MARKS], *order[-2 * MARKS :]]
    return tuple(both[p] for p in few)


def _statements(
    old: Sequence[Source],
    new: Sequence[Source],
    *,
    task: str,
    base: Checkpoint,
    readings: Readings,
    later: Sequence[str],
) -> list[_Said]:
    """The user's sentences in the order in which they were said, each once: read already, known, new, still to come."""
    found: dict[str, _Said] = {}

    def put(position: int, sentence: Sentence, claims: Frame | None, kept: str = "") -> None:
        key = normal(sentence.text)
        before = found.pop(key, None)
        kinds = frozenset({kept} - {""}) | (before.kept if before else frozenset())
        found[key] = _Said(position, sentence, claims, kinds)

    def read(sources: Sequence[Source]) -> None:
        for source in sources:
            if source.role == "user" and not source.is_result:
                reading = readings.of(source)
                for sentence, claims in zip(reading.sentences, reading.frames, strict=True):
                    put(source.position, sentence, claims)

    if task and not any(s.text == task for s in (*old, *new)):
        read([Source(-1, "user", task)])
    read(old)
    for kind, lines in (("rule", base.constraints), ("criterion", base.success_criteria), (SAID, _told(base))):
        for line in lines:
            sentence = read_sentence(line, index=0)
            put(_position(base, line) if kind == SAID else -1, sentence, frame(sentence), kind)
    read(new)
    for text in later:
        for statement in statements(text):
            sentence = read_sentence(statement, index=0)
            put(-1, sentence, frame(sentence), "later")
    return list(found.values())


def _told(base: Checkpoint) -> list[str]:
    """What the user stated as fact, of the previous state."""
    return [bare(line).removeprefix(f"{SAID}: ") for line in base.environment if line.startswith(f"{SAID}: ")]


def _position(base: Checkpoint, text: str) -> int:
    line = next((e for e in base.environment if bare(e) == f"{SAID}: {text}"), "")
    number = re.search(r"\(message (-?\d+)\)\Z", line)
    return int(number.group(1)) if number else -1


def _stated(
    said: Sequence[_Said], stale: Mapping[int, Successor]
) -> tuple[tuple[str, ...], tuple[str, ...], list[tuple[int, str]]]:
    """The constraints, the success criteria and the facts that the user stated and has not surely replaced."""
    standing = _standing(said, stale)
    rules: dict[str, None] = {}
    criteria: dict[str, None] = {}
    facts: dict[str, int] = {}
    for index, one in enumerate(said):
        newer = stale.get(index)
        if "later" in one.kept or (newer and newer.sure and not newer.remains and index not in standing):
            continue
        text = _NESTED.sub(r"[now \1]", newer.remains) if newer and newer.remains else one.sentence.text
        is_criterion = "criterion" in one.kept or bool(_CRITERION.search(text))
        if is_criterion:
            criteria[text] = None
        if index in standing:
            rules[text] = None
        elif not is_criterion and (newer is None or newer.remains) and (SAID in one.kept or _is_fact(one)):
            facts[text] = one.position
    return tuple(rules), tuple(criteria), [(position, text) for text, position in facts.items()]


def _standing(said: Sequence[_Said], stale: Mapping[int, Successor]) -> frozenset[int]:
    """The statements that are rules and stand.

    What replaces a rule is one, whatever its words; a rule of which hardly more than a value was changed ("make it
    three") stands beside the change, which says nothing without it.
    """
    ruled = {i for i, s in enumerate(said) if "rule" in s.kept or s.sentence.rule >= RULE_THRESHOLD}
    gone: set[int] = set()
    for index in range(len(said)):
        newer = stale.get(index)
        if index not in ruled or newer is None or not newer.sure or newer.remains:
            continue
        ruled.add(newer.index)
        claims, text = said[newer.index].frame, said[newer.index].sentence.text
        if not ((claims is not None and claims.is_elliptic) or _POINTS_BACK.search(text)):
            gone.add(index)
    return frozenset(ruled - gone)


def _is_fact(said: _Said) -> bool:
    """Whether a sentence states what a later step may need by its letters."""
    sentence = said.sentence
    if len(sentence.text) > LONGEST or sentence.text.rstrip().endswith("?"):
        return False
    if sentence.label and (_STATED.search(sentence.label) or sentence.label.isupper()):
        return True
    kinds = {m.kind for m in sentence.mentions}
    if said.frame is not None and said.frame.attributes and kinds & _MEASURED and sentence.rule < 1:
        return True
    return bool(kinds & STRONG) and bool(_TELLS.search(sentence.text))


def _with_facts(lines: Sequence[str], facts: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """What programs reported and behind it what the user stated, the newest of either."""
    board = {key_of(line): line for line in lines if not line.startswith(f"{SAID}: ")}
    stated: dict[str, str] = {}
    for position, text in facts[-MOST_FACTS // 2 :]:
        add(stated, SAID, text, position)
    return (*tuple(board.values())[-MOST_FACTS // 2 :], *stated.values())


def _subtasks(
    old: Sequence[Source],
    new: Sequence[Source],
    concluded: Sequence[tuple[Source, Conclusion]],
    tools: NoteTaking,
    *,
    base: Checkpoint,
) -> tuple[Subtask, ...]:
    """The subtasks of the newest lists; where there never was one, what the assistant reports as done."""
    known = base.subtasks or subtasks_of(old, tools)
    listed = _has_list((*old, *new), tools)
    if listed or any(s.status is not Status.DONE and not s.told for s in known):
        return subtasks_of(new, tools, known=known)
    board = {normal(s.text): s for s in known}
    for source, said in concluded:
        text = shorten(said.text, LONGEST)
        brief = bool(source.calls) or len(source.text) <= LONGEST_REPORT
        if said.label == "done" and said.weight >= REPORT and brief and not is_hedged(said.text):
            board.setdefault(normal(text), Subtask(text, Status.DONE))
    return bounded(tuple(board.values()))


def _has_list(sources: Sequence[Source], tools: NoteTaking) -> bool:
    if any(list_in_call(call.arguments) is not None for _, call in calls_in(sources, tools)):
        return True
    return any(s.role in {"user", "assistant"} and not s.is_result and items_in_text(s.text) for s in sources)


def _decisions(
    concluded: Sequence[tuple[Source, Conclusion]],
    said: Sequence[_Said],
    stale: Mapping[int, Successor],
    *,
    base: Checkpoint,
) -> tuple[Decision, ...]:
    """What was decided, the newest few: by the assistant, and by the user in so many words."""
    made = [(s.position, shorten(c.text, 2 * LONGEST)) for s, c in concluded if _is_decision(c)]
    gone: set[str] = set()
    for index, one in enumerate(said):
        newer = stale.get(index)
        if newer is not None and newer.sure:
            gone.add(normal(decision_of(one.sentence.text).text))
        elif not one.kept and decides(one.sentence.text, by_user=True):
            made.append((one.position, one.sentence.text))
    board = {key: d for d in base.decisions if (key := normal(d.text)) not in gone}
    for _, text in sorted(made, key=lambda m: m[0]):
        decision = decision_of(text)
        board.setdefault(normal(decision.text), decision)
    return tuple(board.values())[-MOST_DECISIONS:]


def _is_decision(said: Conclusion) -> bool:
    """Whether a conclusion is of a decision; where another cue is stronger, only in so many words."""
    return decides(said.text, by_user=said.label != "decided")


def _learnings(concluded: Sequence[tuple[Source, Conclusion]], *, base: Checkpoint) -> tuple[str, ...]:
    board = {normal(text): text for text in base.learnings}
    for source, said in concluded:
        brief = bool(source.calls) or len(source.text) <= LONGEST_REPORT
        if brief and _LESSON.search(said.text) and not _ASKS.search(said.text):
            text = shorten(said.text, LONGEST)
            board.setdefault(normal(text), text)
    return tuple(board.values())[-MOST_LEARNINGS:]


def _notes(sources: Sequence[Source], tools: NoteTaking, *, base: Checkpoint) -> tuple[str, ...]:
    """The notes that were taken, without the lists of what is to do: these are the subtasks."""
    board = {normal(text): text for text in base.notes}
    for note in notes_in(sources, tools):
        if note.category != "task_progress":
            text = f"{note.category}: {shorten(note.text, LONGEST)}"
            board.setdefault(normal(text), text)
    return tuple(board.values())[-MOST_NOTES:]
