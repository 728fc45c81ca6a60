"""The structured state of a task: read from messages by code as a delta on the last one, then
merged with what a model adds.

The user's statements are kept word for word, a status comes from a list, an issue is the line that
a tool printed, and decisions and learnings are what a note says. None of it is guessed from the
words of a language. What a model or another conversation added to the last state that was saved is
not lost.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

from policies.effects import Flow
from policies.ledger import ConversationState, Note, Status, TaskDecision
from policies.lines import DATA
from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.memory.notes import flaw, notes_in, read_notes, subtasks_of
from policies.messages import ToolCall, Transcript, answered_calls, first_user, same_call, units
from policies.settings import ContextSettings
from policies.summary.ask import condense, lines_of
from policies.text.choice import Item, Weights, choose
from policies.text.extract import Links, candidates, extract
from policies.text.gist import key_argument
from policies.text.segments import (
    Readings,
    Segment,
    Source,
    TextReading,
    clipped,
    is_question,
    may_report,
    normal,
    parse,
    sources_of,
    terms_of,
    voices,
)
from policies.tokens import TokenCounter, shorten

MAX_LINE_LEN = 240
MAX_NOTES = 10
MAX_DECISIONS = 12
MAX_LEARNINGS = 10
ALIKE = 0.6
"""Share of their terms from which two entries say the same."""
MIN_PART_LEN = 12
MARKS = 4
STEPS_BETWEEN = 10
NOTES_AT_ONCE = 600
IDENTIFIERS_OF = 400
"""The tokens of an extract whose identifiers a saved state lists as shown."""


def read_state(
    sources: Sequence[Source],
    *,
    goal: str,
    previous: Checkpoint | None = None,
    readings: Readings | None = None,
) -> Checkpoint:
    """The state of a task after these messages; messages that ``previous`` has already read are not
    read again.

    Identifiers are not read here: an extract ranks them highest.
    """
    base = previous or Checkpoint()
    until = known_until(sources, base.marks)
    new = [s for s in sources if s.position > until]
    task = base.goal or goal or next((s.text for s in sources if s.is_users), "")
    before = [] if base.goal or any(s.text == task for s in new) else [Source(-1, "user", task)]
    notes = notes_in(new)
    readings = Readings() if readings is None else readings
    errors = _errors(new)
    others = [
        f"{n.category}: {n.text}"
        for n in notes
        if n.category not in {"task_progress", "decisions", "learnings"}
    ]
    stated = _stated([*before, *new])
    decided = [_decision(text) for text in (*_texts(notes, "decisions"), *stated["decision"])]
    return base.advance(
        goal=task,
        success_criteria=_newest(base.success_criteria, stated["criteria"], most=MAX_NOTES),
        constraints=_statements(
            [*before, *new], goal=task, known=base.constraints, readings=readings
        ),
        subtasks=subtasks_of(new, known=base.subtasks),
        decisions=_with_decisions(base.decisions, decided),
        open_issues=_open_issues(new, errors, known=base.open_issues),
        environment=_environment(new, errors, known=(*base.environment, *stated["environment"])),
        learnings=_newest(base.learnings, _texts(notes, "learnings"), most=MAX_LEARNINGS),
        notes=_newest(base.notes, others, most=MAX_NOTES),
        marks=_marks(sources, base.marks, until=until),
    )


def milestone(new: Sequence[Source], *, state: Checkpoint | None) -> str | None:
    """``subtask_done``, ``decision`` or ``blocker`` where these messages hold one that ``state``
    does not.
    """
    known = state or Checkpoint()
    done = {normal(s.text) for s in known.with_status(Status.DONE)}
    listed = subtasks_of([s for s in new if s.role != "user"], known=known.subtasks)
    if any(s.status is Status.DONE and normal(s.text) not in done for s in listed):
        return "subtask_done"
    decided = _texts(notes_in(new), "decisions")
    if any(not any(_alike(text, d.text) for d in known.decisions) for text in decided):
        return "decision"
    issues = _open_issues(new, _errors(new), known=known.open_issues)
    return "blocker" if set(issues) - set(known.open_issues) else None


_LABEL = re.compile(
    r"[\s#>*_-]{0,12}(?P<criteria>success criteria|acceptance criteria|definition of done)?"
    r"(?P<environment>environment)?(?P<decision>decisions?|decided)?[*_]{0,4}:[\s*_]{0,6}",
    re.IGNORECASE,
)
_ITEM = re.compile(r"\s{0,20}(?:[-*\u2022+]|\d{1,3}[.)]) ")
_REASON = re.compile(r"[,;]? \(?because ", re.IGNORECASE)
_AGAINST = re.compile(r"[,;]? (?:instead of|rather than) ", re.IGNORECASE)


def _stated(sources: Sequence[Source]) -> dict[str, list[str]]:
    """What follows a label in a message, on its line or as a list below; from a model only its
    decisions.
    """
    found: dict[str, list[str]] = {"criteria": [], "environment": [], "decision": []}
    for source in sources:
        if source.is_result or source.role not in {"user", "assistant"} or ":" not in source.text:
            continue
        kind = None
        for line in clipped(source.text).splitlines():
            label = _LABEL.match(line[:MAX_LINE_LEN])
            item = _ITEM.match(line)
            if label is not None and label.lastgroup is not None:
                kind = label.lastgroup if source.is_users or label.lastgroup == "decision" else None
                said = line[label.end() :]
            elif item is not None:
                said = line[item.end() :]
            else:
                kind = None
                said = ""
            if kind is not None and said.strip():
                found[kind].append(_line(said.strip()))
    return found


def _decision(text: str) -> TaskDecision:
    """What was decided, with why and against what where its words say so."""
    said, why = _halved(text, _REASON)
    said, against = _halved(said, _AGAINST)
    if not against:
        why, against = _halved(why, _AGAINST)
    others = tuple(each.strip(" .") for each in against.split(", ") if each.strip(" ."))
    return TaskDecision(_line(said), why.strip(" .)"), others)


def _halved(text: str, mark: re.Pattern[str]) -> tuple[str, str]:
    found = mark.search(text)
    return (text, "") if found is None else (text[: found.start()], text[found.end() :])


def _texts(notes: Sequence[Note], category: str) -> list[str]:
    return [note.text for note in notes if note.category == category]


def _line(text: str) -> str:
    return shorten(text, MAX_LINE_LEN)


def _newest(known: Sequence[str], texts: Sequence[str], *, most: int) -> tuple[str, ...]:
    board = {normal(text): text for text in known}
    for text in texts:
        board.setdefault(normal(text), _line(text))
    return tuple(board.values())[-most:]


def _with_decisions(
    known: Sequence[TaskDecision], made: Sequence[TaskDecision]
) -> tuple[TaskDecision, ...]:
    board = list(known)
    for decision in made:
        if not any(_alike(decision.text, other.text) for other in board):
            board.append(decision)
    return tuple(board[-MAX_DECISIONS:])


def _alike(one: str, other: str) -> bool:
    """Whether two entries say the same: the same words, one within the other, or most terms in
    common.
    """
    first = normal(_bare(one))
    second = normal(_bare(other))
    if first == second or (
        min(len(first), len(second)) >= MIN_PART_LEN and (first in second or second in first)
    ):
        return True
    mine = set(terms_of(first))
    yours = set(terms_of(second))
    return bool(mine and yours) and len(mine & yours) >= ALIKE * len(mine | yours)


def known_until(sources: Sequence[Source], marks: Sequence[str]) -> int:
    """The highest position that a state with these marks has read; -1 where it read another
    history.
    """
    agree, differ, newest = _compared(sources, marks)
    return (
        newest if agree and not differ else max([p for p in agree if p < min(differ)], default=-1)
    )


def _compared(sources: Sequence[Source], marks: Sequence[str]) -> tuple[list[int], list[int], int]:
    """The positions at which a message is the one that was marked, those where it is another, and
    the last mark's.
    """
    at = {s.position: s for s in sources if s.role != DATA}
    told = [(int(p), digest) for p, _, digest in (m.partition(":") for m in marks) if p.isdigit()]
    same = {p: _digest(at[p]) == digest for p, digest in told if p in at}
    return (
        [p for p in same if same[p]],
        [p for p in same if not same[p]],
        max((p for p, _ in told), default=-1),
    )


def _digest(source: Source) -> str:
    said = f"{source.role}\0{source.tool}\0{source.text}"
    return blake2b(said.encode(errors="replace"), digest_size=4).hexdigest()


def _marks(sources: Sequence[Source], marks: Sequence[str], *, until: int) -> tuple[str, ...]:
    """A few of the messages that have been read by now: the first ones, some between, and the
    newest last.
    """
    sources = [source for source in sources if source.role != DATA]
    if not sources or (until >= 0 and sources[-1].position <= until):
        return tuple(marks)
    step = max(1, len(sources) // MARKS)
    chosen = {*range(min(MARKS, len(sources))), *range(0, len(sources), step)}
    chosen |= set(range(max(0, len(sources) - MARKS), len(sources)))
    own = {sources[i].position: f"{sources[i].position}:{_digest(sources[i])}" for i in chosen}
    kept = {
        int(m.partition(":")[0]): m for m in marks if until >= 0 and m.partition(":")[0].isdigit()
    }
    both = {p: m for p, m in kept.items() if p <= until} | own
    order = sorted(both)
    few = order if len(order) <= 4 * MARKS else [*order[: 2 * MARKS], *order[-2 * MARKS :]]
    return tuple(both[p] for p in few)


# What the user said: whole sentences, byte for byte, in order; a statement never without the later
# one about the same. They are chosen as an extract is, by how informative they are in this
# conversation, so that a rule weighs the same in every language. Nothing is declared out of date:
# the order shows what holds.

MAX_SENTENCES = 60
MAX_TOKENS = 1_000
BYTES_PER_TOKEN = 4
TOKENS_PER_LINE = 12
"""Tokens added to a line's own count, so that a few words do not outweigh a rule."""
IN_GOAL = 0.5
"""What a sentence counts that the goal holds as well."""
KNOWN = 2.0
"""The factor for one that has been chosen before: an informative statement does not give way to the
next small talk.
"""
MIN_TERMS = 2
MIN_LETTERS = 0.5
"""Share of letters below which a line was printed by a program rather than said."""


def _statements(
    sources: Sequence[Source], *, goal: str, known: Sequence[str] = (), readings: Readings
) -> tuple[str, ...]:
    spoken = [source for source in sources if source.is_users]
    if not spoken:
        return tuple(known)
    every = [*(Source(-1, "user", line, tokens=_tokens(line)) for line in known), *spoken]
    read = [
        *(_undivided(source) for source in every[: len(known)]),
        *(readings.of(source) for source in spoken),
    ]
    weights = Weights.over(read)
    items = _each_once(
        [i for i in candidates(every, read, weights) if not i.segment.key and _states(i.segment)]
    )
    for item in items:
        item.cost = _tokens(item.segment.text) + TOKENS_PER_LINE
        item.factor *= (IN_GOAL if item.segment.text in goal else 1.0) * (
            KNOWN if item.source < len(known) else 1.0
        )
    links = Links(items, every)
    chosen: list[int] = []
    left = MAX_TOKENS
    for group in choose(
        items, MAX_TOKENS + TOKENS_PER_LINE * MAX_SENTENCES, weights=weights, links=links
    ):
        left -= sum(_tokens(items[n].segment.text) for n in group)
        if left < 0 or len(chosen) + len(group) > MAX_SENTENCES:
            break
        chosen.extend(group)
    return tuple(items[n].segment.text for n in sorted(chosen))


_NO_LETTER = re.compile(r"[\x00-@\[-`{-\x7f]")


def _states(segment: Segment) -> bool:
    if len(segment.terms) < MIN_TERMS or is_question(segment.text):
        return False
    telling = "".join(segment.text.split())
    return len(_NO_LETTER.findall(telling)) <= (1 - MIN_LETTERS) * len(telling)


def _tokens(text: str) -> int:
    return 1 + len(text.encode(errors="replace")) // BYTES_PER_TOKEN


def _undivided(source: Source) -> TextReading:
    made = TextReading(source)
    made.segments = [Segment(source.text, terms_of(source.text))]
    return made


def _each_once(items: Sequence[Item]) -> list[Item]:
    newest: dict[str, Item] = {}
    for item in sorted(items, key=lambda i: (i.source, i.place)):
        key = normal(item.segment.text)
        newest.pop(key, None)
        newest[key] = item
    return list(newest.values())


# What is still wrong: the last error of each call that has not succeeded since, by what programs
# print. An issue is the call that showed the error, followed by the line that names it:
# ``run_tests(tests/a.py): KeyError: 'x'``.

MAX_ISSUES = 8
ALL_READ = 4_000
"""Characters of an output that is read whole; of a longer one its last lines, where programs say
what went wrong.
"""
LAST_LINES = 30
MIN_ERROR_STATUS = 400
_ERRORS = ("error", "errors", "exception", "error_message", "errormessage")
_FLAGS = ("is_error", "iserror", "failed")
_SUCCESSES = ("success", "ok")
_CODES = ("exit_code", "exitcode", "exit_status", "returncode", "return_code")
_STATUSES = ("status", "status_code", "statuscode", "http_status")
_MESSAGES = ("message", "detail", "stderr", "content", "text", "reason", "output", "code", "type")
_FAILED = frozenset({"error", "failed", "failure"})
_RAISED = re.compile(
    r"(?:E\s+)?(?:[\w.]*(?:Error|Exception)|panic|fatal)\b(?:\[\w+\])?(?::\s|\s*\Z)", re.IGNORECASE
)
_REPORTED = re.compile(
    r"\A(?:[^\s:]+:(?:\d+:)*\s+)?(?:fatal |compile |syntax )?error\b\s*(?:\[\w+\])?:"
    r"|\A(?:FAILED|FAIL|ERROR|ERR!|npm ERR!|Traceback \()(?=\W|\Z)"
    r"|: (?:No such file or directory|(?:command )?not found|Permission denied|Is a directory)\Z"
    r"|\bexit(?:ed)?(?: with)?(?: code| status)?[:=]? ?-?[1-9]\d{0,2}\b|\b[1-9]\d* (?:failed|errors?)\b"
    r"|\AHTTP/[\d.]+ [45]\d\d\b|\b(?:HTTP|status(?: code)?)[ :=]{1,2}[45]\d\d\b|\A[45]\d\d (?:[A-Z][a-z]+ ?){1,4}\Z"
)
_TOLD_BY = (
    "error",
    "err!",
    "exception",
    "panic",
    "fatal",
    "fail",
    "traceback",
    "no such file",
    "not found",
    "permission denied",
    "is a directory",
    "exit",
    "http",
    "status",
)
"""What such a line has one of, unless it begins with a status code."""


def _errors(sources: Sequence[Source]) -> dict[int, str]:
    return {s.position: _error_in(s.text) for s in sources if s.is_result and s.role != DATA}


def _open_issues(
    sources: Sequence[Source], errors: Mapping[int, str], *, known: Sequence[str]
) -> tuple[str, ...]:
    board: dict[str, tuple[str, str] | None] = dict.fromkeys(known)
    for source in sources:
        if not source.tool:
            continue
        call = same_call(ToolCall("", source.tool, source.arguments))
        argument = key_argument(source.arguments) if source.arguments else ""
        named = f"{source.tool}({argument}): " if argument else f"{source.tool}: "
        for text in [
            t for t, made in board.items() if made == call or (made is None and t.startswith(named))
        ]:
            del board[text]
        if error := errors[source.position]:
            board[f"{named}{error}"] = call
    return tuple(board)[-MAX_ISSUES:]


def _error_in(text: str) -> str:
    document = parse(clipped(text))
    if document is not None:
        return _error_in_document(document)
    lines = [" ".join(line.split()) for line in text[-10 * ALL_READ :].splitlines()]
    if len(text) > ALL_READ:
        lines = lines[-LAST_LINES:]
    telling = [line for line in lines if line[:1].isdigit() or may_report(line, _TOLD_BY)]
    for shape in (_RAISED.match, _REPORTED.search):
        found = next((line for line in reversed(telling) if shape(line[: 2 * MAX_LINE_LEN])), "")
        if found:
            return _line(found)
    return ""


def _error_in_document(document: object) -> str:
    if not isinstance(document, Mapping):
        return ""
    values = {str(key).lower().replace("-", "_"): value for key, value in document.items()}
    named = next((v for key in _ERRORS if (v := values.get(key))), None)
    if named is None and not _has_failed(values):
        return ""
    return _line(" ".join(_message(named, values).split()))


def _has_failed(values: Mapping[str, object]) -> bool:
    statuses = [values.get(key) for key in _STATUSES]
    return (
        any(values.get(key) is True for key in _FLAGS)
        or any(values.get(key) is False for key in _SUCCESSES)
        or any(isinstance(code := values.get(key), int) and code != 0 for key in _CODES)
        or any(isinstance(status, int) and status >= MIN_ERROR_STATUS for status in statuses)
        or any(isinstance(status, str) and status.lower() in _FAILED for status in statuses)
    )


def _message(named: object, values: Mapping[str, object]) -> str:
    if isinstance(named, list) and named:
        named = named[0]
    if isinstance(named, str):
        return named
    within = named if isinstance(named, Mapping) else {}
    texts = (
        v
        for place in (within, values)
        for key in _MESSAGES
        if isinstance(v := place.get(key), str) and v.strip()
    )
    said = next(texts, "")
    return (
        said.strip().splitlines()[-1]
        if said
        else next((f"{k} {v}" for k, v in values.items()), "failed")
    )


# What holds around a task: directory, branch, files that were written, each with its message. Only
# what a program reported or a call requested counts; an answer's words about it do not.

MAX_FACTS = 20
MAX_READ = 4_000
"""Characters at the beginning of a result that are read."""
MAX_VALUE_LEN = 160
_DIRECTORY = re.compile(
    r"(?:current directory|working directory|\bcwd|\bPWD)\b['\"]?\s{0,9}[:=]\s{0,9}['\"]?"
    r"((?:/|~|[A-Z]:\\)[^\s'\"(),;]{1,200})",
    re.IGNORECASE,
)
_PLACES = ("directory", "cwd", "pwd")
_BRANCHES = ("on branch ", "switched to ", "## ", "already on ")
"""What a text in lower case has to have before it is searched for the above."""
_CHANGED = re.compile(r"(?:\A|[;&|\n][^\S\n]*+|&& )cd ((?:/|~)[^\s;&|'\"]{1,160})")
_BRANCH = re.compile(
    r"^(?:On branch|Switched to (?:a new )?branch|##|Already on) ['\"]?([\w./-]{1,80}?)(?:['\"]|\.\.\.\S*|\s|$)",
    re.MULTILINE,
)
_WRITES = re.compile(r"(?:write|create|save|new_file|touch|edit|patch)", re.IGNORECASE)
_PATHS = frozenset({"path", "file_path", "filename", "file", "target_file", "filepath"})
_POSITION = re.compile(r" \(message \d+\)\Z")


def _environment(
    sources: Sequence[Source], errors: Mapping[int, str], *, known: Sequence[str]
) -> tuple[str, ...]:
    board = {_key_of(line): line for line in known}
    for source in (each for each in sources if each.position in errors):
        for name, value in (
            _facts(source, has_failed=bool(errors[source.position])) if source.is_result else ()
        ):
            line = f"{name}: {value.rstrip('.,;:)')[:MAX_VALUE_LEN]} (message {source.position})"
            old = board.pop(_key_of(line), "")
            board[_key_of(line)] = old if _bare(old) == _bare(line) else line
    return tuple(board.values())[-MAX_FACTS:]


def _bare(line: str) -> str:
    return _POSITION.sub("", line)


def _key_of(line: str) -> str:
    name, _, value = _bare(line).partition(": ")
    return f"{name}: {value.lower()}" if name == "file" else name


def _facts(source: Source, *, has_failed: bool) -> Iterator[tuple[str, str]]:
    if not has_failed:
        yield from _facts_of_call(source)
    text = source.text[:MAX_READ]
    low = text.lower()
    for name, pattern, signs in (("cwd", _DIRECTORY, _PLACES), ("git branch", _BRANCH, _BRANCHES)):
        for match in pattern.finditer(text) if any(sign in low for sign in signs) else ():
            yield name, match.group(1)


def _facts_of_call(source: Source) -> Iterator[tuple[str, str]]:
    asked = parse(source.arguments)
    if not isinstance(asked, Mapping):
        return
    for key, value in asked.items():
        if not isinstance(value, str):
            continue
        if str(key).lower() in _PATHS and _WRITES.search(source.tool):
            yield "file", value
        for match in _CHANGED.finditer(value[:MAX_READ]) if "cd " in value else ():
            yield "cwd", match.group(1)
        shown = source.text.strip()
        if value.strip() == "pwd" and shown.startswith("/") and len(shown.split()) == 1:
            yield "cwd", shown


def previous_state(known: ConversationState, sources: Sequence[Source] = ()) -> Checkpoint | None:
    """The state to go on from: this conversation's own, or the one that it resumed.

    Runs that begin alike may share what is known of them for a while. A state that has read other
    messages than those in ``sources`` is from another run: its numbers are kept, its content is
    not.
    """
    own = _checkpoint(known.checkpoint)
    resumed = _checkpoint(known.resumed)
    agree, differ, _ = _compared(sources, () if own is None else own.marks)
    # where nothing agrees, something before all of it has changed
    if own is None or not (agree and differ):
        return own or resumed
    return replace(
        resumed or Checkpoint(), version=own.version, window_id=own.window_id, saved_at=own.saved_at
    )


def _checkpoint(text: str | None) -> Checkpoint | None:
    with suppress(InvalidCheckpoint):
        return Checkpoint.from_json(text) if text else None
    return None


def state_of(
    transcript: Transcript,
    *,
    known: ConversationState,
    counter: TokenCounter,
    readings: Readings | None = None,
) -> Checkpoint:
    sources = _sources(transcript, since=0)
    task = first_user(transcript)
    goal = "" if task is None else voices(transcript.read(task), "user")[0]
    previous = previous_state(known.at(len(transcript.chain)), sources)
    state = read_state(sources, goal=goal, previous=previous, readings=readings)
    made = extract(
        sources, max_tokens=IDENTIFIERS_OF, counter=counter, goal=goal, readings=readings
    )
    cuts = [cut for cut in known.cuts if transcript.begins_with(cut.covers, cut.prefix)]
    told = next((cut.narrative for cut in reversed(cuts) if cut.narrative), state.narrative)
    return replace(state, identifiers=made.identifiers, narrative=told, version=known.next_version)


def milestone_of(transcript: Transcript, *, known: ConversationState) -> str | None:
    fresh = _sources(transcript, since=known.length)
    return milestone(fresh, state=previous_state(known.at(len(transcript.chain))))


def _sources(transcript: Transcript, *, since: int) -> list[Source]:
    messages = transcript.messages
    first = transcript.head + since
    begin = first
    while transcript.head < begin < len(messages) and messages[begin].is_result:
        begin -= 1  # to the message that made the calls
    calls = answered_calls(transcript, units(messages, begin))
    indices = [i for i in range(first, len(messages)) if not messages[i].is_head]
    return sources_of(transcript, indices, calls)


def notes_of(transcript: Transcript, *, known: ConversationState) -> tuple[Note, ...]:
    return notes_in(_sources(transcript, since=known.length))


def wants_notes(
    transcript: Transcript, *, settings: ContextSettings, known: ConversationState
) -> bool:
    first = settings.notes.extract_from
    if settings.summarizer is None or first is None:
        return False
    steps = transcript.steps
    if len(steps) < first:
        return False
    fresh = sum(1 for unit in steps if unit.start >= transcript.head + known.length)
    return any((len(steps) - back) % STEPS_BETWEEN == 0 for back in range(fresh))


def write_notes(
    transcript: Transcript, *, known: ConversationState, counter: TokenCounter, max_input: int
) -> Flow[tuple[Note, ...]]:
    steps = transcript.steps[-STEPS_BETWEEN:]
    sources = _sources(
        transcript, since=steps[0].start - transcript.head if steps else known.length
    )
    written = yield from condense(
        lines_of(sources),
        prompt="notes",
        max_tokens=NOTES_AT_ONCE,
        max_input=max_input,
        counter=counter,
        key=transcript.chain[-1].hex(),
    )
    found = (replace(note, source="model") for note in read_notes(written.text))
    return tuple(note for note in found if not flaw(note))
