"""What real clients send is legal: by the rules alone, and to a simulator on a port."""

from collections import Counter

import httpx
import pytest

from tests import violations
from tests.captures import ALL, Capture, everything, sample
from tests.upstream import Dialect, SimulatorSettings, run_simulator

pytestmark = pytest.mark.slow

ENDPOINTS = (
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def problems(capture: Capture) -> list[str]:
    if "/responses" in capture.path:
        return [problem.message for problem in violations.of_responses(capture.body)]
    found = violations.of_messages(capture.body, counting="count_tokens" in capture.path)
    return [problem.message for problem in found]


def both() -> list[Capture]:
    return [*sample(), *everything()]


def test_the_rules_find_nothing_wrong_with_what_clients_send():
    assert {capture.name: found for capture in both() if (found := problems(capture))} == {}


def test_the_sample_has_every_endpoint():
    assert {capture.path.partition("?")[0] for capture in sample()} >= set(ENDPOINTS)


@pytest.mark.skipif(not ALL.exists(), reason="all captures are needed")
def test_all_captures_are_there():
    assert len(list(everything())) == 161


@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.VLLM, Dialect.LLAMACPP])
def test_a_simulator_answers_what_clients_send(dialect):
    """What other servers signed and stored is taken as given: only they could know it."""
    settings = SimulatorSettings(window=400_000, dialect=dialect, foreign=True, models=("gpt-5",))
    mine = {Dialect.OPENAI: "/v1/responses", Dialect.ANTHROPIC: "/v1/messages"}.get(dialect, "/v1/")
    captures = sample() if dialect in {Dialect.VLLM, Dialect.LLAMACPP} else both()
    statuses: Counter[int] = Counter()
    with run_simulator(settings, counter=Words()) as running, httpx.Client(base_url=running.origin) as client:
        assert client.head("/").status_code == 200  # how Claude Code begins
        for capture in captures:
            only_openai = dialect is not Dialect.OPENAI and capture.path.endswith("/compact")
            if not capture.path.startswith(mine) or only_openai:
                continue
            headers = {"anthropic-beta": capture.beta}
            answer = client.post(capture.path, json=capture.body, headers=headers)
            assert answer.status_code == 200, (capture.name, answer.text)
            if capture.body.get("stream"):
                assert "response.completed" in answer.text or "message_stop" in answer.text
            statuses[answer.status_code] += 1
    assert statuses[200] >= 5
