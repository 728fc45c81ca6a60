"""A call that is made again and again, and what each tool brought."""

from collections.abc import Sequence

import pytest

from policies.messages import Body, Message, Run, ToolCall, Transcript, chain_of, follow_calls, results_by_tool

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
def test_other_arguments_another_tool_or_a_user_begin_anew() -> None:
    other, tool = ("read", '{"path": "b.py"}'), ("write", '{"path": "a.py"}')
    assert longest([user(), asks(READ), asks(READ), asks(other), asks(READ)])[-1] == 1
    assert longest([user(), asks(READ), asks(READ), asks(tool)])[-1] == 1
    assert longest([user(), asks(READ), asks(READ), user(), asks(READ)]) == [0, 1, 2, 0, 1]


@pytest.mark.requirement("A0.121")
def test_arguments_are_compared_as_json_and_words_beside_the_call_do_not_matter() -> None:
    spelt = ("read", '{"path":"a.py"}'), ("grep", '{"a": 1, "b": 2}'), ("grep", '{"b":2,"a":1}')
    assert longest([user(), asks(READ), asks(spelt[0], text="Once more.")])[-1] == 2
    assert longest([user(), asks(spelt[1]), asks(spelt[2])])[-1] == 2
    assert longest([user(), asks(("grep", '{"a": "12"}')), asks(("grep", '{"a": "21"}'))])[-1] == 1
    long = ("write", "x" * 5_000), ("write", "x" * 5_000), ("write", "x" * 5_001)
    assert longest([user(), asks(long[0]), asks(long[1])])[-1] == 2
    assert longest([user(), asks(long[0]), asks(long[2])])[-1] == 1


@pytest.mark.requirement("A0.121")
def test_calls_side_by_side_count_each_for_itself() -> None:
    other = ("read", '{"path": "b.py"}')
    assert longest([user(), asks(READ, other), asks(other, READ), asks(READ, other)])[-1] == 3
    assert longest([user(), asks(READ, READ, READ)])[-1] == 3
    assert longest([user(), asks(READ, other), asks(("ls", "{}"))])[-1] == 1


def test_only_new_messages_are_read() -> None:
    steps = [user(), *[asks(READ), result()] * 40]
    run = follow_calls(transcript(*steps[:-2]), Run(), length=0, most=3)
    read: list[int] = []
    after = follow_calls(transcript(*steps, read=read), run, length=len(steps) - 2, most=3)
    assert read == [len(steps) - 2]
    assert after.longest == 4


def test_where_nothing_is_known_the_newest_steps_are_read() -> None:
    steps = [user(), *[asks(READ), result()] * 40]
    for run, length in ((Run(), len(steps) - 2), (Run(b"another end", (("read", READ[1], 9),)), len(steps) - 2)):
        read: list[int] = []
        assert follow_calls(transcript(*steps, read=read), run, length=length, most=3).longest == 3
        assert len(read) == 3


@pytest.mark.requirement("A3.17")
def test_results_are_counted_by_the_tool_that_brought_them() -> None:
    made = transcript(
        user(),
        asks(("read", "{}")),
        result(10),
        asks(("grep", "{}"), ("read", "{}")),
        result(7, "id-grep-0"),
        result(30, "id-read-1"),
        result(99, "nobody"),
    )
    assert results_by_tool(made, 0) == {"read": (2, 40, 30), "grep": (1, 7, 7)}
    assert results_by_tool(made, 3) == {"grep": (1, 7, 7), "read": (1, 30, 30)}
    assert results_by_tool(made, 7) == {}
