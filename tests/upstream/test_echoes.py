"""What real clients send back of an answer is what they were given: sealed, bound and stored, with nothing taken on trust.

A captured run is led once more: the simulator says what the client was told then, and what the simulator has sealed
and named stands in the next captured request in the place of what it was then.
"""

import json
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import httpx
import pytest

from tests.captures import Capture, everything
from tests.upstream import Dialect, SimulatedAnswer, SimulatedCall, SimulatorSettings, run_simulator
from tests.upstream.responses_rules import is_model, items_of, kind_of

pytestmark = pytest.mark.slow

KINDS = ("rs_", "msg_", "fc_", "ctc_", "gAAAA", "Eq")
Step = tuple[SimulatedAnswer, list[str]]


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def runs(endpoint: str) -> Iterator[tuple[str, list[Capture]]]:
    """The runs of an endpoint, as far as each request goes on from the one before."""
    for name, captures in groupby(everything(), key=lambda capture: capture.name.rpartition(" ")[0]):
        asked = [capture for capture in captures if capture.path.startswith(endpoint) and "thread" not in capture.body]
        asked = [capture for capture in asked if "/compact" not in capture.path and "tokens" not in capture.path]
        whole = list(asked[:1])
        for before, after in pairwise(asked):
            if after.body.get("tools") != before.body.get("tools"):
                break  # Codex's own compaction, behind which reasoning is bound to other tools
            if not after.body.get("previous_response_id") and not grown(before.body, after.body):
                break
            whole.append(after)
        if len(whole) > 1:
            yield name, whole


def grown(before: dict[str, Any], after: dict[str, Any]) -> bool:
    given, now = before.get("input") or before.get("messages"), after.get("input") or after.get("messages")
    said = [one.get("role") or one.get("type") for one in now[: len(given)]]
    return len(now) > len(given) and said == [one.get("role") or one.get("type") for one in given]


def response_step(before: dict[str, Any], after: dict[str, Any]) -> Step:
    """What the model said between two requests, and the texts in it that the server made up."""
    items = items_of(after)
    items = items if after.get("previous_response_id") else items[len(items_of(before)) :]
    reasoning, text, calls, names = "", "", list[SimulatedCall](), list[str]()
    for item in items:
        name, kind = str(item.get("id", "")), kind_of(item)
        if kind in {"function_call_output", "custom_tool_call_output"} and after.get("previous_response_id"):
            tool = "search_files" if kind == "function_call_output" else "apply_patch"
            calls.append(SimulatedCall(tool, "{}", id=item["call_id"]))
        if not is_model(item):
            continue
        names += [value for value in (name, item.get("encrypted_content")) if value]
        if name.startswith("rs_"):
            reasoning = (item.get("summary") or [{"text": "Hm."}])[0]["text"]
        elif name.startswith("msg_"):
            text = (item.get("content") or [{"text": "Well."}])[0]["text"]
        elif kind in {"function_call", "custom_tool_call"}:
            calls.append(SimulatedCall(item["name"], item.get("arguments") or item["input"], id=item["call_id"]))
    return SimulatedAnswer(reasoning=reasoning, text=text, calls=tuple(calls)), names


def message_step(before: dict[str, Any], after: dict[str, Any]) -> Step:
    blocks = [
        block
        for message in after["messages"][len(before["messages"]) :]
        if message["role"] == "assistant"
        for block in message["content"]
    ]
    found = {kind: [block for block in blocks if block["type"] == kind] for kind in ("thinking", "text", "tool_use")}
    calls = [SimulatedCall(b["name"], json.dumps(b["input"]), id=b["id"]) for b in found["tool_use"]]
    thought = "".join(block["thinking"] for block in found["thinking"])
    answer = SimulatedAnswer(reasoning=thought, text="".join(b["text"] for b in found["text"]), calls=tuple(calls))
    return answer, [block["signature"] for block in found["thinking"]]


def made_up(answer: dict[str, Any]) -> list[str]:
    """What the simulator named and sealed, in the order of the texts that a step lists."""
    if "content" in answer:
        return [block["signature"] for block in answer["content"] if block["type"] == "thinking"]
    return [
        str(value) for item in answer["output"] for value in (item.get("id"), item.get("encrypted_content")) if value
    ]


def lead(endpoint: str, captures: list[Capture], dialect: Dialect) -> Iterator[dict[str, Any]]:
    """Lead one run once more; what it answered."""
    told = [SimulatedAnswer(text="Done.")]
    swaps: dict[str, str] = {}
    settings = SimulatorSettings(
        window=400_000, dialect=dialect, bound=True, answer=lambda _: told[0], summary_model="nobody"
    )
    with run_simulator(settings, counter=Words()) as running, httpx.Client(base_url=running.origin) as client:
        for at, capture in enumerate(captures):
            names: list[str] = []
            if at + 1 < len(captures):
                step = response_step if endpoint == "/v1/responses" else message_step
                told[0], names = step(capture.body, captures[at + 1].body)
            text = json.dumps({**capture.body, "stream": False})
            for old, new in swaps.items():
                text = text.replace(json.dumps(old), json.dumps(new))
            answer = client.post(capture.path, content=text, headers={"anthropic-beta": capture.beta})
            assert answer.status_code == 200, (capture.name, answer.text)
            for kind in KINDS:
                mine = [name for name in made_up(answer.json()) if name.startswith(kind)]
                swaps |= dict(zip([name for name in names if name.startswith(kind)], mine, strict=False))
            if at + 1 < len(captures) and (chain := captures[at + 1].body.get("previous_response_id")):
                swaps[chain] = answer.json()["id"]
            yield answer.json()


def test_responses_come_back_as_they_were_given():
    led = list(runs("/v1/responses"))
    if not led:
        pytest.skip("all captures are needed")
    for name, captures in led:
        for answer in lead("/v1/responses", captures, Dialect.OPENAI):
            assert answer["input_transformations"] == [], name
    assert sum(len(captures) for _, captures in led) > 50


def test_messages_come_back_as_they_were_given():
    led = list(runs("/v1/messages"))
    if not led:
        pytest.skip("all captures are needed")
    for _, captures in led:
        assert list(lead("/v1/messages", captures, Dialect.ANTHROPIC))
    assert sum(len(captures) for _, captures in led) > 50
