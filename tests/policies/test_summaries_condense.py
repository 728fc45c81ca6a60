"""The flow of a summary, rung by rung, played without a model."""

import json
import random
import re
from collections.abc import Callable, Sequence

import pytest

from policies.effects import Answers, Effect, Failed, Flow, Reply, Summarize, Summary, Together
from policies.summary.ask import Written, condense
from policies.summary.material import MaterialLine
from policies.summary.prompts import PROMPTS
from policies.tokens import CHARS4, CharCounter
from tests.policies.play import play, words

GOOD = (
    'Goal: according to the user: "Find out why order W7731 is late."\n'
    'Done: according to the result of read: "src/depot.py: class Depot, for D-17; see src/order.py"\n'
    'Open problems: according to the result of run: "E4411 carrier refused the manifest"\n'
    "Next step: look at the manifest of order W7731"
)
LINES = (
    MaterialLine("user", "Find out why order W7731 is late."),
    MaterialLine("assistant", "I read the code."),
    MaterialLine("assistant calls read", '{"path": "src/depot.py"}'),
    MaterialLine("result of read", f"src/depot.py: class Depot, for D-17; see src/order.py\n{words(200, 'code')}"),
    MaterialLine("assistant calls read", '{"path": "src/order.py"}'),
    MaterialLine("result of read", f"src/order.py: uses src/depot.py {words(200, 'rows')}"),
    MaterialLine("assistant calls run", '{"command": "ship W7731"}'),
    MaterialLine("result of run", f"{words(40, 'output')}\nE4411 carrier refused the manifest"),
)
ASK = Summarize


def chatter(count: int) -> str:
    """``count`` words that say nothing and nothing twice."""
    rng = random.Random(count)
    said = ["".join(rng.choice("aeioumnrst") for _ in range(rng.randint(2, 7))) for _ in range(count)]
    return "".join(f"{word}{'. ' if n % 9 == 8 else ' '}" for n, word in enumerate(said))


def flow(lines: Sequence[MaterialLine] = LINES, **changes: object) -> Flow[Written]:
    given: dict[str, object] = {"prompt": "structured", "max_tokens": 300, "max_input": 32_000, "counter": CHARS4}
    return condense(lines, **(given | changes))  # type: ignore[arg-type]


def drive(running: Flow[Written], answer: Callable[[Summarize], Reply]) -> tuple[Written, list[Summarize]]:
    """What a flow returns, and every question that it asked."""
    asked: list[Summarize] = []

    def tell(effect: Effect) -> Reply:
        if isinstance(effect, Together):
            return Answers(tuple(tell(e) for e in effect.effects))  # type: ignore[misc]
        assert isinstance(effect, Summarize)
        asked.append(effect)
        return answer(effect)

    reply: Reply | None = None
    while True:
        try:
            effect = next(running) if reply is None else running.send(reply)
        except StopIteration as end:
            return end.value, asked
        reply = tell(effect)


@pytest.mark.requirement("A0.58", "R.55")
def test_what_is_invented_goes_and_is_named() -> None:
    written = play(flow(), (ASK, Summary(GOOD.replace("\nNext", "\nLearnings: W9999 was never ordered\nNext"))))
    assert written.text == GOOD
    assert written.dropped == ("W9999",)


@pytest.mark.requirement("A1.10", "A3.10")
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_prompt_can_be_asked(prompt: str) -> None:
    text = GOOD if prompt != "level_3" else "Order W7731 late: E4411"
    written = play(flow(prompt=prompt, task="Why is W7731 late?"), (ASK, Summary(text)))
    assert text in written.text
    assert written.purpose == PROMPTS[prompt].purpose


@pytest.mark.requirement("A3.11")
def test_the_prefix_of_a_handover_stands_once_also_the_second_time() -> None:
    prefix = PROMPTS["handoff"].prefix
    first = play(flow(prompt="handoff"), (ASK, Summary(GOOD)))
    assert first.text == f"{prefix}\n{GOOD}"
    running = flow(prompt="handoff", previous=first.text)
    asked = next(running)
    assert isinstance(asked, Summarize)
    assert prefix not in asked.prompt
    with pytest.raises(StopIteration) as end:
        running.send(Summary(f"{prefix} {prefix}\n{GOOD}"))
    assert end.value.value.text == f"{prefix}\n{GOOD}"


def facts(count: int, tokens: int = 300) -> list[MaterialLine]:
    """A long history: calls with their results, each with an identifier of its own."""
    lines = [MaterialLine("user", "Read all the pages.")]
    for n in range(count):
        lines += [
            MaterialLine("assistant calls look", f'{{"page": "P-{n:05}"}}'),
            MaterialLine("result of look", f"page P-{n:05} {words(tokens, f'w{n}')}"),
        ]
    return lines


def reader(question: Summarize) -> Reply:
    """A summariser that names the first and last page that it can see."""
    pages = re.findall(r"P-\d{5}", question.prompt)
    return Summary(
        f"Goal: read all the pages\nDone: the pages from {pages[0]} on were read\nNext step: go on behind page {pages[-1]} with the next one"
    )


def size(question: Summarize, count: Callable[[str], int] = CHARS4.count) -> int:
    return count(question.system) + count(question.prompt) + count(json.dumps(question.schema)) + question.max_tokens


@pytest.mark.requirement("A0.80", "R.54")
@pytest.mark.parametrize("counter", [CHARS4, CharCounter(2, 5)])
def test_a_history_ten_times_the_summarisers_window_is_read_whole_in_parts(counter: CharCounter) -> None:
    lines = facts(1_000)
    whole = sum(counter.count(line.text) for line in lines)
    assert whole > 300_000
    written, asked = drive(flow(lines, max_tokens=900, max_input=32_000, by_schema=True, counter=counter), reader)
    assert written.failure == ""
    assert "P-00000" in written.text
    assert "P-00999" in written.text
    assert max(size(q, counter.count) for q in asked) <= 32_000
    assert whole // 32_000 < len(asked) <= 32 + 2
    seen = "".join(q.prompt for q in asked[:-1])
    assert all(f"[result of look] page P-{n:05}" in seen for n in range(1_000))
    assert written.calls == len(asked)
    assert [bool(q.schema) for q in asked] == [False] * (len(asked) - 1) + [True]
    for question in asked[:-1]:
        body = question.prompt.partition("> transcript\n")[2]
        assert not body.startswith("[result of look]")


@pytest.mark.requirement("A0.80", "R.54")
@pytest.mark.parametrize("max_input", [2_500, 3_000, 4_096, 8_192])
@pytest.mark.parametrize("previous", ["", "Goal: earlier\n" + words(3_000, "earlier")], ids=["first", "with notes"])
def test_no_question_is_longer_than_the_summariser_can_read(max_input: int, previous: str) -> None:
    lines = [*facts(40), MaterialLine("result of look", f"page P-77777 {words(30_000, 'huge')}"), *facts(40, 20)]
    long = f"Left to do: read the pages. {chatter(1_500)}"

    def answer(question: Summarize) -> Reply:
        return Summary(long[: 4 * question.max_tokens])

    written, asked = drive(flow(lines, max_tokens=700, max_input=max_input, previous=previous, most_chunks=8), answer)
    assert written.failure == ""
    assert max(size(q) for q in asked) <= max_input
    assert len(asked) <= 2 * (8 + 8)


@pytest.mark.requirement("R.54", "R.52")
def test_a_part_that_fails_is_asked_once_more_and_then_left_out() -> None:
    failing: set[str] = set()

    def once(question: Summarize) -> Reply:
        if "P-00010" in question.prompt and "notes on part" not in question.prompt and question.prompt not in failing:
            failing.add(question.prompt)
            return Failed("status_500")
        return reader(question)

    lines = facts(60)
    good, asked = drive(flow(lines, max_input=6_000), once)
    assert good.failure == ""
    parts = [q.prompt for q in asked if "notes on part" not in q.prompt]
    assert len(parts) == len(set(parts)) + 1

    def never(question: Summarize) -> Reply:
        return (
            Failed("status_500")
            if "P-00010" in question.prompt and "notes on part" not in question.prompt
            else reader(question)
        )

    left_out, _ = drive(flow(lines, max_input=6_000), never)
    assert left_out.failure == ""
