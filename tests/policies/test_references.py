"""Which results the model used, by the identifiers that come back in what it says and does later."""

import json

import pytest

from policies.messages import Transcript, answered_calls, units
from policies.strategies.redundancy import References, last_references
from tests.policies.play import Said, assistant, step, talk, user, words


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


@pytest.mark.parametrize(
    "text",
    ["-" * 200_000, "\\" * 200_000, '"' * 99_999, "/" * 200_000, "a/" * 100_000, "é" * 200_000, words(50_000, "x_1")],
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    transcript = talk(TASK, *call(text), assistant("src/a.py uses x_1 and " + text[:20_000]))
    references_of(transcript)  # quadratic would take hours
