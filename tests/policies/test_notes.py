import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.ledger import ConversationState, Note
from policies.memory.notes import CATEGORIES, flaw, notes_in, read_notes, render_notes
from policies.memory.state import wants_notes
from policies.messages import ToolCall
from policies.settings import ContextSettings, NoteTaking
from policies.text.segments import Source
from policies.tokens import CHARS4
from tests.policies.play import talk, user

TOOLS = NoteTaking()


def note(text: str, category: str = "misc", importance: str = "normal", source: str = "model") -> Note:
    return Note(category, importance, text, source)


def call(name: str, arguments: str) -> list[Source]:
    return [
        Source(1, "assistant", "", calls=(ToolCall("c1", name, arguments),)),
        Source(2, "tool", "saved", name, arguments),
    ]


@pytest.mark.requirement("A0.60")
@pytest.mark.parametrize(
    ("name", "arguments", "made"),
    [
        ("save_note", '{"note": "worker.py leaks lease-4411"}', note("worker.py leaks lease-4411", source="tool")),
        (
            "mcp__desk__add_note",
            '{"title": "lease-4411", "content": "leaks", "category": "bug", "priority": "High"}',
            note("lease-4411: leaks", "bugs", "high", "tool"),
        ),
        ("memory_write", '{"key": "port", "value": "5673", "type": "shoes"}', note("port: 5673", source="tool")),
        (
            "TodoWrite",
            '{"todos": [{"content": "read it", "status": "completed"}, {"content": "write it", "status": "doing"}]}',
            note("doing: write it; done: read it", "task_progress", "high", "tool"),
        ),
    ],
)
def test_a_note_tool_leaves_one_note(name: str, arguments: str, made: Note) -> None:
    assert notes_in(call(name, arguments), TOOLS) == (made,)


def test_other_tools_and_calls_without_words_leave_none() -> None:
    assert notes_in(call("read_file", '{"note": "x"}'), TOOLS) == ()
    assert notes_in(call("save_note", "{}"), TOOLS) == ()
    assert notes_in(call("save_note", "not json"), TOOLS) == ()


@pytest.mark.requirement("A0.60")
def test_fenced_blocks_of_answers_are_notes_and_those_of_results_are_not() -> None:
    text = "Go on.\n```decision\nuse leases, workers crash\n```\n```python\nx = 1\n```\n```todo\n- [ ] write it\n```\n"
    made = notes_in([Source(1, "assistant", text)], TOOLS)
    assert made == (
        note("use leases, workers crash", "decisions", source="fence"),
        note("TODO: write it", "task_progress", "high", "fence"),
    )
    assert notes_in([Source(1, "tool", text, "fetch")], TOOLS) == ()
    marked = "```note category=bugs importance=critical\nlease-4411 leaks\n```"
    assert notes_in([Source(1, "assistant", marked)], TOOLS) == (note("lease-4411 leaks", "bugs", "critical", "fence"),)


def test_of_two_lists_and_of_two_notes_with_one_key_the_newer_stays() -> None:
    first = '{"todos": [{"content": "a1", "status": "pending"}]}'
    second = '{"todos": [{"content": "a1", "status": "completed"}]}'
    made = notes_in([*call("TodoWrite", first), *call("TodoWrite", second)], TOOLS)
    assert [n.text for n in made] == ["done: a1"]
    text = render_notes([note("port: 5671"), note("port: 5673"), note("Port: 5673.")], max_tokens=200, counter=CHARS4)
    assert text == "Notes on misc:\n- Port: 5673."


@pytest.mark.requirement("A0.63")
def test_lines_of_a_model_are_notes_and_everything_else_is_not() -> None:
    text = (
        "Here are the notes:\n| category | importance | text |\n|---|---|---|\n"
        "- bugs | critical | worker.py:41 leaks lease-4411 when ack() raises\n"
        "| decisions | high | use leases | not locks |\n"
        "weather | loud | it rains in Oslo\n"
        "learnings | the broker batches by 32\n"
        "constraints | normal | none\n"
    )
    assert read_notes(text) == (
        note("worker.py:41 leaks lease-4411 when ack() raises", "bugs", "critical"),
        note("use leases | not locks", "decisions", "high"),
        note("it rains in Oslo"),
        note("the broker batches by 32", "learnings"),
    )
    assert read_notes("") == ()


@pytest.mark.requirement("A0.61")
def test_a_note_without_an_identifier_is_flagged() -> None:
    assert flaw(note("continuing investigation", "task_progress")) == "no identifier"
    assert flaw(note("Continuing investigation", "bugs")) == "no identifier"
    assert flaw(note("  ")) == "empty"
    assert flaw(note("worker.py leaks when ack() raises, probably the retry loop", "bugs")) == ""
    assert flaw(note("never deploy without asking", "constraints")) == ""


def are_wanted(tools: NoteTaking, *, turns: int) -> bool:
    """Whether a model is to take notes on a conversation of so many turns."""
    policy, said = ContextSettings(summarizer="same", notes=tools), [user(str(n)) for n in range(turns)]
    return wants_notes(talk(*said), settings=policy, known=ConversationState())


@pytest.mark.requirement("A0.62")
def test_no_notes_are_taken_before_the_twentieth_turn() -> None:
    tools = NoteTaking(extract=True)
    assert not are_wanted(tools, turns=9)
    assert not are_wanted(tools, turns=19)
    assert are_wanted(tools, turns=20)
    assert not are_wanted(NoteTaking(), turns=400)


@pytest.mark.requirement("A0.81")
def test_no_notes_are_rendered_as_nothing() -> None:
    assert render_notes([], max_tokens=2_000, counter=CHARS4) == ""
    assert render_notes([note("  ")], max_tokens=2_000, counter=CHARS4) == ""


@pytest.mark.requirement("A0.63", "A0.81")
def test_categories_have_their_order_and_within_one_the_critical_comes_first_then_the_newest() -> None:
    notes = [
        note("old plain"),
        note("high one", importance="high"),
        note("critical one", importance="critical"),
        note("new plain"),
        note("odd category", category="weather", importance="loud"),
        note("a decision", "decisions"),
        note("TODO: a1", "task_progress"),
    ]
    assert render_notes(notes, max_tokens=400, counter=CHARS4).splitlines() == [
        "Notes on task progress:",
        "- TODO: a1",
        "Notes on decisions:",
        "- a decision",
        "Notes on misc:",
        "- (critical) critical one",
        "- (high) high one",
        "- odd category",
        "- new plain",
        "- old plain",
    ]


@pytest.mark.requirement("A0.81")
def test_a_critical_note_has_room_before_plain_ones_of_earlier_categories() -> None:
    notes = [note(f"step {n}: " + "word " * 20, "task_progress") for n in range(30)]
    text = render_notes([*notes, note("disk dies", importance="critical")], max_tokens=200, counter=CHARS4)
    assert "(critical) disk dies" in text
    assert text.startswith("Notes on task progress:")


@pytest.mark.requirement("A0.63", "A0.81")
def test_rendering_stops_where_fewer_than_fifty_tokens_are_left() -> None:
    assert render_notes([note("short")], max_tokens=49, counter=CHARS4) == ""
    assert render_notes([note("short")], max_tokens=50, counter=CHARS4) == "Notes on misc:\n- short"


@pytest.mark.requirement("A0.63", "A0.81")
@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((*CATEGORIES, "weather")),
            st.sampled_from(("critical", "high", "normal", "loud")),
            st.text(alphabet="ab c1.|\n", max_size=300),
        ),
        max_size=60,
    ),
    st.sampled_from((0, 60, 500, 2_000)),
)
def test_rendered_notes_never_exceed_their_budget_nor_leave_a_bare_heading(
    given_notes: list[tuple[str, str, str]], budget: int
) -> None:
    notes = [Note(c, i, t, "model") for c, i, t in given_notes]
    text = render_notes(notes, max_tokens=budget, counter=CHARS4)
    assert CHARS4.count(text) <= budget
    lines = text.splitlines()
    for n, line in enumerate(lines):
        if line.startswith("Notes on "):
            assert lines[n + 1].startswith("- ")
    assert render_notes(notes, max_tokens=budget, counter=CHARS4) == text
