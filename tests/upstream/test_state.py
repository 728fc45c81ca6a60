"""What the simulated servers sign, bind and keep, on both endpoints, spoken to with the real SDKs."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.upstream import Dialect, RunningSimulator, SimulatedAnswer, SimulatedCall, SimulatorSettings, run_simulator

pytestmark = pytest.mark.slow

SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "search", "description": "s", "input_schema": {"type": "object", "properties": {}}}
STEPS = (
    SimulatedAnswer(
        reasoning="I look in two places.",
        text="Looking now.",
        calls=(SimulatedCall("search", '{"q": "a"}'), SimulatedCall("search", '{"q": "b"}')),
    ),
    SimulatedAnswer(reasoning="One more.", calls=(SimulatedCall("search", '{"q": "c"}'),)),
    SimulatedAnswer(reasoning="And one.", calls=(SimulatedCall("search", '{"q": "d"}'),)),
    SimulatedAnswer(reasoning="Enough.", text="It is 42."),
)
ASK = {"role": "user", "content": "Where is it?"}


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def responses_at(running: RunningSimulator, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url, api_key=key, max_retries=0)


def messages_at(running: RunningSimulator) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.origin, api_key="k", max_retries=0)


# OpenAI

SEALED = {"model": "m", "tools": [SEARCH], "store": False, "include": ["reasoning.encrypted_content"]}


@pytest.fixture
def server() -> Iterator[tuple[RunningSimulator, openai.OpenAI]]:
    with run_simulator(SimulatorSettings(answers=STEPS), counter=Words()) as running, responses_at(running) as client:
        yield running, client


def answered(output: list[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "found it here"} for item in output if item.type == "function_call"
    ]  # fmt: skip


def run(client: openai.OpenAI, steps: int, **more: Any) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = [ASK]
    for _ in range(steps):
        output = client.responses.create(input=history, **{**SEALED, **more}).output
        history += [item.model_dump(exclude_none=True) for item in output] + answered(output)
    return history


def told(refused: pytest.ExceptionInfo[openai.APIStatusError]) -> str:
    return str(refused.value.message)


def test_sealed_reasoning_comes_back_as_it_was_or_not_at_all(server):
    running, client = server
    history = run(client, 2)
    client.responses.create(input=history, **SEALED)
    altered = copy.deepcopy(history)
    sealed = altered[1]["encrypted_content"]
    altered[1]["encrypted_content"] = sealed[:40] + ("A" if sealed[40] != "A" else "B") + sealed[41:]
    with pytest.raises(openai.BadRequestError, match="could not be verified") as refused:
        client.responses.create(input=altered, **SEALED)
    assert refused.value.code == "invalid_encrypted_content"
    moved = copy.deepcopy(history)
    moved[1]["encrypted_content"] = history[7]["encrypted_content"]
    with pytest.raises(openai.BadRequestError, match="item_id did not match the target item id"):
        client.responses.create(input=moved, **SEALED)
    with (
        responses_at(running, "another") as other,
        pytest.raises(openai.BadRequestError, match="could not be verified"),
    ):
        other.responses.create(input=history, **SEALED)


def test_items_that_were_made_together_stay_together(server):
    _, client = server
    history = run(client, 2)
    without = [item for item in history if item.get("id") != history[1]["id"]]
    with pytest.raises(openai.BadRequestError, match="without its required 'reasoning' item: 'rs_"):
        client.responses.create(input=without, **SEALED)
    calls = [at for at, item in enumerate(history) if item.get("type") == "function_call"]
    apart = [item for at, item in enumerate(history) if at not in {2, *calls[:2], *(c + 2 for c in calls[:2])}]
    with pytest.raises(openai.BadRequestError, match="without its required following item"):
        client.responses.create(input=apart, **SEALED)


def test_what_is_not_stored_is_not_found(server):
    _, client = server
    stored = client.responses.create(model="m", tools=[SEARCH], input=[ASK])
    kept = [{"type": "item_reference", "id": item.id} for item in stored.output]
    client.responses.create(model="m", tools=[SEARCH], input=[ASK, *kept, *answered(stored.output)])
    bare = [{"type": "reasoning", "id": stored.output[0].id, "summary": []}, *kept[1:], *answered(stored.output)]
    client.responses.create(model="m", tools=[SEARCH], input=[ASK, *bare])
    lost = client.responses.create(model="m", tools=[SEARCH], input=[ASK], store=False)
    references = [{"type": "item_reference", "id": item.id} for item in lost.output]
    with pytest.raises(openai.NotFoundError, match="Items are not persisted when `store` is set to false"):
        client.responses.create(model="m", tools=[SEARCH], input=[ASK, *references, *answered(lost.output)])


def test_a_chain_is_the_whole_context(server):
    _, client = server
    first = client.responses.create(model="m", tools=[SEARCH], input=[ASK])
    with pytest.raises(openai.BadRequestError, match="No tool output found for function call"):
        client.responses.create(model="m", tools=[SEARCH], input="go on", previous_response_id=first.id)
    second = client.responses.create(
        model="m", tools=[SEARCH], input=answered(first.output), previous_response_id=first.id
    )
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 3
    assert second.previous_response_id == first.id
    counted = client.responses.input_tokens.count(
        model="m", tools=[SEARCH], input=answered(first.output), previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="go", previous_response_id="resp_0")
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_chain_overflows_with_all_that_is_behind_it():
    settings = SimulatorSettings(window=100, answers=(SimulatedAnswer(text="w " * 40),))
    with run_simulator(settings, counter=Words()) as running, responses_at(running) as client:
        first = client.responses.create(model="m", input="w " * 40)
        with pytest.raises(openai.BadRequestError, match="exceeds the context window"):
            client.responses.create(model="m", input="w " * 20, previous_response_id=first.id)


def test_stored_answers_are_fetched_listed_and_deleted(server):
    running, client = server
    first = client.responses.create(model="m", tools=[SEARCH], input=[ASK])
    assert client.responses.retrieve(first.id).output == first.output
    assert [item.role for item in client.responses.input_items.list(first.id)] == ["user"]
    with responses_at(running, "another") as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            other.responses.create(model="m", input="go", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
        client.responses.retrieve(first.id)


def test_a_conversation_grows_at_the_server():
    with run_simulator(SimulatorSettings(), counter=Words()) as running, responses_at(running) as client:
        talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Remember 7."}])
        sizes = [
            client.responses.create(model="m", input="Go on.", conversation=talk.id).usage.input_tokens
            for _ in range(3)
        ]
        assert sizes[0] < sizes[1] < sizes[2]
        assert client.conversations.retrieve(talk.id).id == talk.id
        with pytest.raises(openai.BadRequestError, match="Mutually exclusive"):
            client.responses.create(model="m", input="x", conversation=talk.id, previous_response_id="resp_1")
        client.conversations.delete(talk.id)
        with pytest.raises(openai.NotFoundError, match="Conversation with id"):
            client.responses.create(model="m", input="x", conversation=talk.id)


def test_bound_reasoning_is_removed_behind_a_change_and_named():
    settings = SimulatorSettings(answers=STEPS, bound=True)
    with run_simulator(settings, counter=Words()) as running, responses_at(running) as client:
        history = run(client, 2)

        def removed(items: list[dict[str, Any]], **more: Any) -> list[str]:
            answer = client.responses.create(input=items, **{**SEALED, **more}).model_dump()
            assert all(one["reason"] == "prefix_mismatch" for one in answer["input_transformations"])
            return [one["id"] for one in answer["input_transformations"]]

        first, second = [item["id"] for item in history if item.get("type") == "reasoning"]
        assert removed(history) == []
        assert removed(history, instructions="anew") == []
        bare = [{key: value for key, value in item.items() if key not in {"status", "phase"}} for item in history]
        assert removed(bare) == []
        edited = copy.deepcopy(history)
        edited[5]["output"] = "cleared"
        assert removed(edited) == [second]
        assert removed(history, tools=[{**SEARCH, "name": "search", "description": "x"}]) == [first, second]
        output = client.responses.create(input=edited, **SEALED).output
        edited += [*(item.model_dump(exclude_none=True) for item in output), *answered(output)]
        assert removed(edited) == [second]


def test_the_server_compacts_when_it_is_asked_to(server):
    running, client = server
    history = run(client, 2)
    with client.responses.stream(input=[*history, {"type": "compaction_trigger"}], **SEALED) as stream:
        (compaction,) = stream.get_final_response().output
    assert compaction.type == "compaction"
    item = compaction.model_dump(exclude_none=True)
    after = client.responses.create(input=[ASK, item, ASK], **SEALED)
    assert after.output
    with pytest.raises(openai.BadRequestError, match="could not be verified"):
        client.responses.create(input=[ASK, {**item, "encrypted_content": "gAAAAAx"}, ASK], **SEALED)
    with pytest.raises(openai.BadRequestError, match="item_id did not match"):
        client.responses.create(input=[ASK, {**item, "id": "cmp_other"}, ASK], **SEALED)
    assert [one.type for one in client.responses.compact(model="m", input=history).output] == ["message", "compaction"]
    whose = {"authorization": "Bearer k"}  # by hand: the SDK does not write users' messages of an output
    asked = {"model": "m", "input": history}
    compacted = httpx.post(f"{running.base_url}/responses/compact", json=asked, headers=whose).json()
    assert client.responses.create(input=compacted["output"], **SEALED).output


def test_a_threshold_makes_the_server_compact_but_not_on_calls_alone(server):
    _, client = server
    when = [{"type": "compaction", "compact_threshold": 1000}]
    long = {"role": "user", "content": "w " * 1200}
    first = client.responses.create(input=[long], context_management=when, **SEALED)
    assert [item.type for item in first.output][:2] == ["compaction", "reasoning"]
    history = [long, *(item.model_dump(exclude_none=True) for item in first.output[1:]), *answered(first.output)]
    assert [item.type for item in client.responses.create(input=history, context_management=when, **SEALED).output] == [
        "reasoning",
        "function_call",
    ]
    said = [*(item.model_dump(exclude_none=True) for item in first.output), *answered(first.output)]
    with run_simulator(SimulatorSettings(answers=STEPS, bound=True), counter=Words()) as bound:
        whose = responses_at(bound)
        for items in ([long, *said], said):  # what stands before a compaction may go
            answer = whose.responses.create(input=items, **SEALED).model_dump()
            assert answer["input_transformations"] == []
            assert answer["usage"]["input_tokens"] < 1700
        whose.close()


# Anthropic

THINK: dict[str, Any] = {"model": "m", "max_tokens": 2000, "tools": [TOOL], "thinking": {"type": "adaptive"}}


def results(content: list[Any]) -> dict[str, Any]:
    found = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "found it over there, " * 9}
        for block in content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": found}


def loop(client: anthropic.Anthropic, steps: int, start: list[Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = [*(start or [ASK])]
    for _ in range(steps):
        content = client.messages.create(messages=history, **{**THINK, **more}).content
        history += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in content]},
            results(content),
        ]
    return history


@pytest.fixture
def claude() -> Iterator[tuple[RunningSimulator, anthropic.Anthropic]]:
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=STEPS)
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        yield running, client


def test_a_whole_and_a_streamed_message_are_one(claude):
    _, client = claude
    whole = client.messages.create(messages=[ASK], **THINK)
    with client.messages.stream(messages=[ASK], **THINK) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.model_dump(exclude={"id", "signature"}) for block in whole.content] == [
        block.model_dump(exclude={"id", "signature"}) for block in streamed.content
    ]
    assert "message_stop" in kinds
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    history = [ASK, {"role": "assistant", "content": streamed.content}, results(streamed.content)]
    assert client.messages.create(messages=history, **THINK).content


def test_signed_thinking_comes_back_as_it_was(claude):
    _, client = claude
    history = loop(client, 2)
    client.messages.create(messages=history, **THINK)
    old, new = copy.deepcopy(history), copy.deepcopy(history)
    old[1]["content"][0]["signature"] = "EqoBx"
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages.1.content.0: Invalid `signature` in `thinking` block"
    ):
        client.messages.create(messages=old, **THINK)
    new[3]["content"][0]["thinking"] = "Something else."
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages.3.content.0: .* latest assistant message cannot be mod"
    ):
        client.messages.create(messages=new, **THINK)
    moved = copy.deepcopy(history)
    moved[3]["content"].insert(0, {"type": "text", "text": "first"})
    with pytest.raises(anthropic.BadRequestError, match="cannot be modified"):
        client.messages.create(messages=moved, **THINK)
    older = copy.deepcopy(history)
    del older[1]["content"][0]
    assert client.messages.create(messages=older, **THINK).content


def transformed(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> list[str]:
    thinking = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    answer = client.beta.messages.create(
        messages=messages, betas=["thinking-binding-controls-2026-08-01"], **{**THINK, "thinking": thinking, **more}
    )
    told = answer.model_dump()["input_transformations"]
    assert all(one["reason"] == "prefix_binding_mismatch" for one in told)
    return [one["path"] for one in told]


def test_bound_thinking_is_refused_behind_a_change_or_dropped_by_leave():
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=STEPS[:1] * 6, bound=True)
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        history = loop(client, 3)
        client.messages.create(messages=history, **THINK)
        marked = copy.deepcopy(history)
        marked[0] = {
            "role": "user",
            "content": [{"type": "text", "text": ASK["content"], "cache_control": {"type": "ephemeral"}}],
        }
        assert client.messages.create(messages=marked, **THINK).content
        edited = copy.deepcopy(history)
        edited[2]["content"][0]["content"] = "cleared"
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages.3.content.0: .* bound to a different conversation"
        ):
            client.messages.create(messages=edited, **THINK)
        assert transformed(client, history) == []
        assert transformed(client, edited) == ["messages.3.content.0", "messages.5.content.0"]
        with pytest.raises(anthropic.BadRequestError, match="block_binding: Extra inputs are not permitted"):
            client.messages.create(messages=edited, **{**THINK, "thinking": {"type": "adaptive", "block_binding": {}}})
        stripped = copy.deepcopy(edited)
        del stripped[3]["content"][0], stripped[5]["content"][0]
        stripped = loop(client, 1, stripped)
        assert client.messages.create(messages=stripped, **THINK).content
        with pytest.raises(anthropic.BadRequestError, match="bound to a different conversation"):
            client.messages.create(messages=history, **{**THINK, "tools": [{**TOOL, "description": "t"}]})


def test_thinking_may_go_from_the_start_but_not_from_the_middle():
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=STEPS, bound=True)
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        history = loop(client, 3)
        start, middle = copy.deepcopy(history), copy.deepcopy(history)
        del start[1]["content"][0]
        assert client.messages.create(messages=start, **THINK).content
        del middle[3]["content"][0]
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages.5.content.0: .* bound to a different conversation"
        ):
            client.messages.create(messages=middle, **THINK)


def test_the_servers_own_edits_are_made_and_reported(claude):
    _, client = claude
    history = loop(client, 3)
    edits = [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 2},
            "keep": {"type": "tool_uses", "value": 1},
        },
    ]
    more: dict[str, Any] = {
        "messages": history,
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": edits},
    }
    answer = client.beta.messages.create(**{**THINK, **more})
    thinking, uses = answer.context_management.applied_edits
    assert (thinking.cleared_thinking_turns, uses.cleared_tool_uses) == (2, 3)
    with client.beta.messages.stream(**{**THINK, **more}) as stream:
        assert stream.get_final_message().context_management == answer.context_management
    count = {key: value for key, value in {**THINK, **more}.items() if key != "max_tokens"}
    counted = client.beta.messages.count_tokens(**count)
    plain = client.messages.count_tokens(messages=history, model="m", tools=[TOOL], thinking={"type": "adaptive"})
    assert counted.context_management.original_input_tokens == plain.input_tokens > counted.input_tokens
    quiet = {**more, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    assert client.beta.messages.create(**{**THINK, **quiet}).context_management.applied_edits == []


def test_a_summary_is_made_signed_and_bound_thinking_outlives_it():
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=STEPS, bound=True)
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        history = loop(client, 2)
        made = client.beta.messages.create(
            messages=history, betas=["compact-2026-09-04"], **{**THINK, "compaction": {"type": "summarize"}}
        )
        assert made.stop_reason == "compaction"
        block = made.content[0].model_dump(exclude_none=True)
        first = {"role": "assistant", "content": [block]}
        after = [first, ASK, *history[3:]]
        assert client.beta.messages.create(messages=after, **THINK).content
        history = loop(client, 1, after)
        assert client.beta.messages.create(messages=history, **THINK).content
        for change, code in (
            ({"content": "another"}, "compaction_content_mismatch"),
            ({"signature": "EqoBx"}, "compaction_signature_invalid"),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.beta.messages.create(messages=[{**first, "content": [{**block, **change}]}, ASK], **THINK)
            assert refused.value.body["error"]["details"]["error_code"] == code


def test_a_conversation_past_its_trigger_is_compacted_in_the_answer():
    answer = SimulatedAnswer(reasoning="Hm.", text="Well.")
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, window=80_000, bound=True, answers=(answer,) * 4)
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 100, "betas": ["compact-2026-01-12"]}
        long = [{"role": "user", "content": "w " * 50_000}]
        answer = client.beta.messages.create(messages=long, context_management={"edits": [edit]}, **ask)
        assert [block.type for block in answer.content] == ["compaction", "thinking", "text"]
        assert [one.type for one in answer.usage.iterations] == ["compaction", "message"]
        told = [block.model_dump(exclude_none=True) for block in answer.content]
        later = client.beta.messages.create(messages=[*long, {"role": "assistant", "content": told}, ASK], **ask)
        assert later.usage.input_tokens < 1000
        dropped = client.beta.messages.create(messages=[{"role": "assistant", "content": told}, ASK], **ask)
        assert dropped.usage.input_tokens == later.usage.input_tokens
        paused = client.beta.messages.create(
            messages=long, context_management={"edits": [{**edit, "pause_after_compaction": True}]}, **ask
        )
        assert (paused.stop_reason, len(paused.content)) == ("compaction", 1)


def threaded(running: RunningSimulator, messages: list[Any], thread: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 200, "messages": messages, "thread": thread, **more}
    return httpx.post(f"{running.base_url}/messages", json=body, headers={"x-api-key": "k"})


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["details"]["error_code"]


def test_a_thread_goes_on_once_until_it_is_forgotten(claude):
    running, _ = claude
    first = threaded(running, [ASK], {"type": "create"}, tools=[TOOL]).json()
    uses = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "x"}
        for b in first["content"]
        if b["type"] == "tool_use"
    ]
    go_on = {"type": "continue", "previous_message_id": first["id"]}
    message = {"role": "user", "content": uses}
    assert "cannot be set when" in threaded(running, [message], go_on, tools=[TOOL]).text
    second = threaded(running, [message], go_on).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert code_of(threaded(running, [message], go_on)) == (400, "thread_already_continued")
    lost = {"type": "continue", "previous_message_id": "msg_0"}
    assert code_of(threaded(running, [message], lost)) == (404, "thread_not_found")
    unfit = [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}]
    refused = threaded(running, unfit, {"type": "create"})
    assert code_of(refused) == (400, "thread_unsupported_request")
    assert refused.json()["error"]["details"]["unsupported"] == ["cache_control"]


def test_a_thread_expires():
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, thread_seconds=0.0)
    with run_simulator(settings, counter=Words()) as running:
        first = threaded(running, [ASK], {"type": "create"}).json()
        go_on = {"type": "continue", "previous_message_id": first["id"]}
        assert code_of(threaded(running, [ASK], go_on)) == (404, "thread_not_found")


@pytest.mark.parametrize("held", [300.0, 0.0])
def test_the_sdks_tool_runner_finishes_on_threads_kept_and_lost(held):
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=STEPS, thread_seconds=held)

    @anthropic.beta_tool
    def search(q: str) -> str:
        """Search."""
        return f"found {q}"

    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        runner = client.beta.messages.tool_runner(model="m", max_tokens=500, messages=[ASK], tools=[search])
        assert runner.until_done().content[-1].text == "It is 42."
        asked = [json.loads(seen.body).get("thread") for seen in running.answered()]
    assert asked[0] == {"type": "create"}
    if held:
        assert [thread["type"] for thread in asked[1:]] == ["continue"] * 3


def test_an_answer_may_end_at_the_window_instead_of_being_refused():
    long = [{"role": "user", "content": "w " * 100}]
    settings = SimulatorSettings(
        dialect=Dialect.ANTHROPIC, window=120, stops_at_window=True, answer=lambda _: SimulatedAnswer(text="w " * 60)
    )
    with run_simulator(settings, counter=Words()) as running, messages_at(running) as client:
        answer = client.messages.create(model="m", max_tokens=50, messages=long)
        assert answer.stop_reason == "model_context_window_exceeded"
        assert client.messages.create(model="m", max_tokens=5, messages=long).stop_reason == "max_tokens"


def test_an_overflow_and_a_fault_may_stand_inside_the_stream():
    settings = SimulatorSettings(dialect=Dialect.ANTHROPIC, window=100, overflow_in_stream="error")
    long = [{"role": "user", "content": "w " * 120}]
    with run_simulator(settings, counter=Words()) as running:
        body = {"model": "m", "max_tokens": 20, "messages": long, "stream": True}
        told = httpx.post(f"{running.base_url}/messages", json=body)
        assert told.status_code == 200
        assert told.text.startswith('event: error\ndata: {"type": "error", "error": {"type": "invalid_request_error"')
        body = {**body, "model": "fault:error_in_stream:3", "messages": [ASK]}
        names = [
            line
            for line in httpx.post(f"{running.base_url}/messages", json=body).text.splitlines()
            if line[:5] == "event"
        ]
        assert names == ["event: message_start", "event: content_block_start", "event: ping", "event: error"]


def test_an_agent_is_led_through_steps_on_every_endpoint():
    schema = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
    ask = [{"role": "user", "content": "go"}]
    tail = [
        {"type": "function_call", "call_id": "step_1_0", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "step_1_0", "output": "x"},
    ]
    settings = SimulatorSettings(dialect=Dialect.VLLM, steps=3)
    with run_simulator(settings, counter=Words()) as running, httpx.Client(base_url=running.base_url) as client:

        def post(path: str, **body: Any) -> Any:
            return client.post(path, json={"model": "m", **body}).json()

        tool = {"type": "function", "name": "f", "parameters": schema}
        said = post("/responses", input=ask, tools=[tool])["output"]
        assert [item["type"] for item in said] == ["reasoning", "message", "function_call", "function_call"]
        said = post("/responses", input=[*ask, *tail], tools=[tool])["output"]
        assert (said[-1]["call_id"], json.loads(said[-1]["arguments"])) == ("step_2_0", {"q": 3})
        said = post("/messages", messages=ask, max_tokens=99, tools=[{"name": "f", "input_schema": schema}])["content"]
        assert [block["type"] for block in said] == ["thinking", "text", "tool_use", "tool_use"]
        said = post("/chat/completions", messages=ask, tools=[{"type": "function", "function": tool}])
        assert len(said["choices"][0]["message"]["tool_calls"]) == 2
        tail = [{**item, "call_id": "step_2_0"} for item in tail]
        assert post("/responses", input=[*ask, *tail], tools=[tool])["output"][-1]["type"] == "message"
