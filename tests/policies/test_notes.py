import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.ledger import Note
from policies.memory.notes import CATEGORIES, notes_in, render_notes
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
