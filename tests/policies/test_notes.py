import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.ledger import Note
from policies.memory.notes import CATEGORIES, notes_in, read_notes, render_notes
from policies.text.segments import Source
from policies.tokens import CHARS4
from tests.profile import tried


def note(text: str, category: str = "misc", importance: str = "normal", source: str = "model") -> Note:
    return Note(category, importance, text, source)


@pytest.mark.requirement("A0.60")
def test_fenced_blocks_of_answers_are_notes_and_those_of_results_are_not() -> None:
    text = "Go on.\n```decision\nuse leases, workers crash\n```\n```python\nx = 1\n```\n```todo\n- [ ] write it\n```\n"
    made = notes_in([Source(1, "assistant", text)])
    assert made == (
        note("use leases, workers crash", "decisions", source="fence"),
        note("TODO: write it", "task_progress", "high", "fence"),
    )
    assert notes_in([Source(1, "tool", text, "fetch")]) == ()
    marked = "```note category=bugs importance=critical\nlease-4411 leaks\n```"
    assert notes_in([Source(1, "assistant", marked)]) == (note("lease-4411 leaks", "bugs", "critical", "fence"),)


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


@pytest.mark.requirement("A0.63", "A0.81")
def test_rendering_stops_where_fewer_than_fifty_tokens_are_left() -> None:
    assert render_notes([note("short")], max_tokens=49, counter=CHARS4) == ""
    assert render_notes([note("short")], max_tokens=50, counter=CHARS4) == "Notes on misc:\n- short"


@pytest.mark.requirement("A0.63", "A0.81")
@settings(max_examples=tried(20, 80), deadline=None)
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
