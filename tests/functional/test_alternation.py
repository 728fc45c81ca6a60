"""Where a client has no two user messages in a row, none go up: strict chat templates refuse them."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, prose, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import Dialect, SimulatorSettings

Body = dict[str, Any]


def chat_step(number: int, text: str) -> list[Body]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
    ]


def responses_step(number: int, text: str) -> list[Body]:
    named = {"call_id": f"call_{number}"}
    return [
        {"type": "function_call", **named, "name": "exec_command", "arguments": f'{{"cmd": "cat {number}"}}'},
        {"type": "function_call_output", **named, "output": text},
    ]


def messages_step(number: int, text: str) -> list[Body]:
    named = f"toolu_{number}"
    call = {"type": "tool_use", "id": named, "name": "Read", "input": {"n": number}}
    return [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": named, "content": text}]},
    ]


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
STEPS = {"chat": chat_step, "responses": responses_step, "messages": messages_step}
TASK = "Migrate the project from axios to fetch."
HEADERS = {"authorization": "Bearer sk-test", "x-api-key": "sk-test", "anthropic-version": "2023-06-01"}


def history(endpoint: str, turns: int, **named: str) -> list[Body]:
    """A task, then turns of two steps, an answer and a user's question each; it ends with a question."""
    said: list[Body] = [{"role": "user", "content": TASK, **named}]
    for turn in range(turns):
        for step in (2 * turn, 2 * turn + 1):
            said += STEPS[endpoint](step, prose(200, seed=step))
        said.append({"role": "assistant", "content": prose(40, seed=5_000 + turn)})
        said.append({"role": "user", "content": f"Question {turn}: {prose(30, seed=7_000 + turn)}"})
    return said


async def forwarded(endpoint: str, said: list[Body]) -> list[Body]:
    """What goes up of a history that does not fit."""
    array = "input" if endpoint == "responses" else "messages"
    limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    settings = SimulatorSettings(window=8_192, dialect=Dialect.VLLM)
    async with (
        serve_simulator(settings, counter=COUNTER) as upstream,
        weir(upstream.base_url, window=8_192) as target,
        httpx.AsyncClient(base_url=target.root, headers=HEADERS, timeout=60) as client,
    ):
        answer = await client.post(PATHS[endpoint], json={"model": "sim", array: said, limit: 300})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-weir-actions"] != "none"
        [seen] = upstream.answered()
    found: list[Body] = json.loads(seen.body)[array]
    return found


def users_in_a_row(array: list[Body]) -> int:
    roles = [each.get("role") or each["type"] for each in array]
    return sum(one == other == "user" for one, other in pairwise(roles))


@pytest.mark.parametrize("endpoint", PATHS)
async def test_what_weir_writes_makes_no_second_user_message_in_a_row(endpoint: str) -> None:
    array = await forwarded(endpoint, history(endpoint, 14))
    assert users_in_a_row(array) == 0
    first = json.dumps(array[0])
    assert TASK in first
    assert "Written by Weir: " in first
