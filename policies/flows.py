"""Flows that go on side by side: what they ask at the same time is asked together."""

from collections.abc import Sequence
from typing import TypeVar

from policies.effects import Answers, Effect, Failed, Flow, Reply, Summarize, Summary, Together

T = TypeVar("T")


def together(flows: Sequence[Flow[T]]) -> Flow[list[T]]:
    """What every flow returns, in order; their questions to the summariser are asked together, round by round.

    Anything else that a flow asks for is asked for on its own, in the order of the flows.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Effect] = {}
    for number, flow in enumerate(flows):
        _advance(flow, None, number, waiting=waiting, results=results)
    while waiting:
        questions = {n: effect for n, effect in waiting.items() if isinstance(effect, Summarize)}
        replies: dict[int, Reply] = {}
        if len(questions) == 1:
            (number,) = questions
            replies[number] = yield questions[number]
        elif questions:
            told = yield Together(tuple(questions.values()))
            replies |= zip(questions, _answers(told, len(questions)), strict=True)
        for number, effect in [*waiting.items()]:
            if number not in questions:
                replies[number] = yield effect
        for number, reply in sorted(replies.items()):
            del waiting[number]
            _advance(flows[number], reply, number, waiting=waiting, results=results)
    return [results[number] for number in range(len(flows))]


def _advance(
    flow: Flow[T], reply: Reply | None, number: int, *, waiting: dict[int, Effect], results: dict[int, T]
) -> None:
    """Take one step of a flow: note what it asks next, or what it returned."""
    try:
        waiting[number] = next(flow) if reply is None else flow.send(reply)
    except StopIteration as end:
        results[number] = end.value


def _answers(told: Reply, count: int) -> tuple[Summary | Failed, ...]:
    """One reply for each question; a failure of all of them where they could not be asked together."""
    if isinstance(told, Answers) and len(told.replies) == count:
        return told.replies
    return (told if isinstance(told, Failed) else Failed("no_reply"),) * count
