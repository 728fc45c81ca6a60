"""Which results the model used, by the identifiers that come back in what it says and does later."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.messages import ToolCall, Transcript, answered_calls, units
from policies.strategies.redundancy import References, last_references
from tests.policies.play import Said, assistant, result, step, talk, user, words


def referenced(*said: Said | tuple[Said, ...]) -> dict[int, References]:
    return references_of(talk(*said))


def references_of(transcript: Transcript) -> dict[int, References]:
    return last_references(transcript, answered_calls(transcript, units(transcript.messages, transcript.head)))


def call(text: str, tool: str = "read_file", **arguments: object) -> tuple[Said, Said]:
    """A step of one call, answered by a result that says nothing."""
    return step(text, tool=tool, arguments=json.dumps(arguments))


UNUSED = References()
TASK = user("Make the tests pass.")

# -- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.31")
def test_a_result_whose_path_is_used_again_at_step_nine_was_last_referenced_there() -> None:
    idle = [call("ok", query=f"nothing {'abcdefgh'[n]}") for n in range(7)]
    found = referenced(TASK, *call("match in src/api/client.ts"), *idle, *call("fine", path="src/api/client.ts"))
    assert found[2] == References(index=17, step=9, count=1)


@pytest.mark.requirement("A0.31")
@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("the tests are running", "The tests are running, and that is fine."),
        ("Error: nothing found", "There was an Error."),
        ("exit code 1 after 10 tries", "I tried 10 times, 1 failed, 0 passed."),
        ("the 2nd attempt", "On the 2nd attempt it worked."),
        ("input/output error", "This is an input/output problem."),
        ("src/api/client.ts", "I look at src/api/server.ts and api/clients.ts."),
        ("lib/client.ts", "I look at src/client.ts."),
        ("parse_headers", "parse_header it is"),
        ('"a"', 'I say "a" to that.'),
        ("1042", "There are 10420 of them, or 104."),
    ],
)
def test_plain_words_small_numbers_and_other_identifiers_are_no_references(said: str, again: str) -> None:
    assert referenced(TASK, *call(said), assistant(again))[2] == UNUSED


# -- what holds always -----------------------------------------------------------------------------------------------

TEXTS = st.lists(
    st.sampled_from(
        ["src/a.py", "lib/src/a.py", "a.py", "parse_header", "412", "7", '"two words"', "\\n", "the", '"', "`"]
    ),
    max_size=6,
).map(" ".join)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=8))
def test_references_are_deterministic_and_point_forward(rows: list[tuple[str, str, str]]) -> None:
    said = [TASK, *(m for text, path, say in rows for m in (assistant(say), *call(text, path=path)))]
    transcript = talk(*said)
    found = references_of(transcript)
    assert references_of(talk(*said)) == found
    assert set(found) == {i for i, m in enumerate(transcript.messages) if m.is_result}
    for index, one in found.items():
        assert (one.index is None) == (one.step is None) == (one.count == 0)
        if one.index is not None:
            assert one.index > index
            assert transcript.messages[one.index].role == "assistant"
            assert one.count <= sum(m.role == "assistant" for m in transcript.messages[index:])


@given(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200))
def test_no_text_breaks_the_analysis(said: str, arguments: str, again: str) -> None:
    spoken = assistant("", ToolCall("c", "f", arguments))
    assert set(referenced(TASK, spoken, result(said, "c"), assistant(again))) == {2}


@pytest.mark.parametrize(
    "text",
    ["-" * 200_000, "\\" * 200_000, '"' * 99_999, "/" * 200_000, "a/" * 100_000, "é" * 200_000, words(50_000, "x_1")],
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    transcript = talk(TASK, *call(text), assistant("src/a.py uses x_1 and " + text[:20_000]))
    references_of(transcript)  # quadratic would take hours
