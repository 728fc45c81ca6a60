"""The state of a whole conversation: when it is worth saving, and what of it has to stand in the window.

Critical is what the user said and what is left to do. The state is read from the messages, as a delta on the last
one that was saved, so what a model or another conversation added to that is not lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.checkpoint import Checkpoint, InvalidCheckpoint
from policies.draft import Bounds, ConversationState
from policies.effects import Flow
from policies.ledger import Note, Status
from policies.messages import Transcript
from policies.notes import flaw, is_due, notes_in, read_notes, render_notes
from policies.settings import ContextSettings
from policies.state import milestone, read_state
from policies.summary import condense, lines_of, normal_text
from policies.text.extract import extract
from policies.text.segments import Readings, Source, sources_of
from policies.tokens import TokenCounter
from policies.turns import answered_calls, first_user, units

MAX_LIST_LEN = 12
STEPS_BETWEEN = 10
"""Steps between two times that a model takes notes."""
NOTES_AT_ONCE = 600
IDENTIFIERS_OF = 400
"""The tokens of an extract whose identifiers a saved state lists as shown."""


def previous_state(known: ConversationState) -> Checkpoint | None:
    """The newest state that was saved, or the one of another conversation that this one goes on from."""
    for text in (known.checkpoint, known.resumed):
        if text:
            try:
                return Checkpoint.from_json(text)
            except InvalidCheckpoint:
                continue
    return None


def occurs_in(sources: Sequence[Source]) -> Callable[[str], bool]:
    """Whether an identifier stands in any of these messages; made when it is first asked."""
    whole: list[str] = []

    def occurs(identifier: str) -> bool:
        if not whole:
            parts = (p for s in sources for p in (s.text, s.arguments, *(c.arguments for c in s.calls)))
            whole.append(normal_text("\n".join(parts)))
        return normal_text(identifier) in whole[0]

    return occurs


def standing_lists(state: Checkpoint, bounds: Bounds, *, most: int, visible: Sequence[str]) -> str:
    """What is left to do and the notes that were taken, within ``most`` tokens; nothing that can be seen anyway."""
    shown = "\n".join(visible)
    tasks = [
        f"- {'doing' if s.status is Status.IN_PROGRESS else 'TODO'}: {s.text}"
        for s in (*state.with_status(Status.IN_PROGRESS), *state.with_status(Status.PLANNED))
        if s.text not in shown
    ][:MAX_LIST_LEN]
    text = ""
    for line in ("Left to do:", *tasks) if tasks else ():
        grown = f"{text}\n{line}" if text else line
        if bounds.counter.count(grown) > most:
            break
        text = grown
    left = min(most - bounds.counter.count(text), bounds.settings.notes.max_tokens)
    notes = [note for note in bounds.known.notes if note.text not in shown]
    said = render_notes(notes, max_tokens=left, counter=bounds.counter) if notes and left > 0 else ""
    return "\n".join(part for part in (text, said) if part)


def state_of(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    known: ConversationState,
    counter: TokenCounter,
    readings: Readings | None = None,
) -> Checkpoint:
    """The state of a conversation as its messages tell it, with the identifiers that matter most."""
    sources = _sources(transcript, since=0)
    goal = goal_of(transcript)
    previous = previous_state(known.at(len(transcript.chain)))
    state = read_state(sources, goal=goal, previous=previous, tools=settings.notes, readings=readings)
    made = extract(sources, max_tokens=IDENTIFIERS_OF, counter=counter, goal=goal, readings=readings)
    told = next((cut.narrative for cut in reversed(known.cuts) if cut.narrative), state.narrative)
    return replace(state, identifiers=made.identifiers, narrative=told, version=known.next_version)


def milestone_of(transcript: Transcript, *, settings: ContextSettings, known: ConversationState) -> str | None:
    """The milestone that the messages hold which no earlier request has sent; None for none."""
    fresh = _sources(transcript, since=known.length)
    if not fresh:
        return None
    return milestone(fresh, state=previous_state(known.at(len(transcript.chain))), tools=settings.notes)


def goal_of(transcript: Transcript) -> str:
    """The text of the first user message, empty without one."""
    task = first_user(transcript.messages)
    return "" if task is None else transcript.read(task).text


def _sources(transcript: Transcript, *, since: int) -> list[Source]:
    """The messages after the head from the ``since``-th on."""
    messages, first = transcript.messages, transcript.head + since
    begin = first
    while transcript.head < begin < len(messages) and messages[begin].is_result:
        begin -= 1  # to the message that made the calls
    calls = answered_calls(transcript, units(messages, begin))
    indices = [i for i in range(first, len(messages)) if not messages[i].is_head]
    return sources_of(transcript, indices, calls)


def notes_of(transcript: Transcript, *, settings: ContextSettings, known: ConversationState) -> tuple[Note, ...]:
    """The notes in the messages that no earlier request has sent: of note-taking tools, and in fenced blocks."""
    return notes_in(_sources(transcript, since=known.length), settings.notes)


def wants_notes(transcript: Transcript, *, settings: ContextSettings, known: ConversationState) -> bool:
    """Whether the conversation is long enough for notes by a model, and has grown enough since the last ones."""
    if settings.summarizer is None:
        return False
    steps = units(transcript.messages, transcript.head)
    if not is_due(settings.notes, turns=len(steps)):
        return False
    fresh = sum(1 for unit in steps if unit.start >= transcript.head + known.length)
    return any((len(steps) - back) % STEPS_BETWEEN == 0 for back in range(fresh))


def write_notes(
    transcript: Transcript, *, known: ConversationState, counter: TokenCounter, max_input: int
) -> Flow[tuple[Note, ...]]:
    """Notes that a model takes on the newest steps; those that say nothing on their own are left out."""
    steps = units(transcript.messages, transcript.head)[-STEPS_BETWEEN:]
    sources = _sources(transcript, since=steps[0].start - transcript.head if steps else known.length)
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
