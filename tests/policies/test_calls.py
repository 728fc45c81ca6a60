"""A call that is made again and again, and what each tool brought."""

from collections.abc import Sequence

import pytest

from policies.messages import Body, Message, Run, ToolCall, Transcript, chain_of, follow_calls

Made = tuple[str, Body, int]


def user(text: str = "go on") -> Made:
    return "user", Body(text), 5


def asks(*calls: tuple[str, str], text: str = "") -> Made:
    made = tuple(ToolCall(f"id-{name}-{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    return "assistant", Body(text, made), 7


def result(tokens: int = 10, answers: str = "id-read-0") -> Made:
    return "tool", Body("x", name=answers), tokens


def transcript(*made: Made, read: list[int] | None = None) -> Transcript:
    messages = [
        Message(
            role=role,
            digest=repr((role, body)).encode()[-16:].rjust(16),
            tokens=tokens,
            call_ids=tuple(c.id for c in body.calls),
            answers=body.name if role == "tool" else None,
        )
        for role, body, tokens in made
    ]

    def body_of(index: int) -> Body:
        if read is not None:
            read.append(index)
        return made[index][1]

    return Transcript(tuple(messages), body_of, chain=chain_of("t", messages, 0))


def longest(steps: Sequence[Made], *, first: int = 1) -> list[int]:
    """How often the newest call was made in a row, after each request that brings one step more."""
    run, found = Run(), list[int]()
    for end in range(first, len(steps) + 1):
        run = follow_calls(transcript(*steps[:end]), run, length=end - 1, most=3)
        found.append(run.longest)
    return found


READ = ("read", '{"path": "a.py"}')


@pytest.mark.requirement("A0.121")
def test_the_same_call_is_counted_from_request_to_request() -> None:
    assert longest([user(), asks(READ), result(), asks(READ), result(), asks(READ), result()]) == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.requirement("A0.121")
def test_arguments_are_compared_as_json_and_words_beside_the_call_do_not_matter() -> None:
    spelt = ("read", '{"path":"a.py"}'), ("grep", '{"a": 1, "b": 2}'), ("grep", '{"b":2,"a":1}')
    assert longest([user(), asks(READ), asks(spelt[0], text="Once more.")])[-1] == 2
    assert longest([user(), asks(spelt[1]), asks(spelt[2])])[-1] == 2
    assert longest([user(), asks(("grep", '{"a": "12"}')), asks(("grep", '{"a": "21"}'))])[-1] == 1
    long = ("write", "x" * 5_000), ("write", "x" * 5_000), ("write", "x" * 5_001)
    assert longest([user(), asks(long[0]), asks(long[1])])[-1] == 2
    assert longest([user(), asks(long[0]), asks(long[2])])[-1] == 1
