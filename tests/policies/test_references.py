"""Which results the model used is found in time linear in the text."""

import json

import pytest

from policies.messages import Transcript, answered_calls, units
from policies.strategies.redundancy import References, last_references
from tests.policies.play import Said, assistant, step, talk, user, words


def references_of(transcript: Transcript) -> dict[int, References]:
    return last_references(transcript, answered_calls(transcript, units(transcript.messages, transcript.head)))


def call(text: str, tool: str = "read_file", **arguments: object) -> tuple[Said, Said]:
    """A step of one call, answered by a result that says nothing."""
    return step(text, tool=tool, arguments=json.dumps(arguments))


TASK = user("Make the tests pass.")


@pytest.mark.parametrize(
    "text",
    ["-" * 200_000, "\\" * 200_000, '"' * 99_999, "/" * 200_000, "a/" * 100_000, "é" * 200_000, words(50_000, "x_1")],
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    transcript = talk(TASK, *call(text), assistant("src/a.py uses x_1 and " + text[:20_000]))
    references_of(transcript)  # quadratic would take hours
