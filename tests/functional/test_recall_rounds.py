"""The recall tool on Responses and Messages: the client never sees a call, and what it led to stays valid."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anthropic
import asyncpg
import httpx
import openai
import pytest

from proxy.recall.tool import definition_of
from proxy.wire import CODECS
from tests.functional.harness import ALONE, COUNTER, EVICTING, SHARED, Deployment, InTurns, answered, prose
from tests.profile import each_once, soak
from tests.upstream import Dialect, Problem, Request, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8192
SECRET = "the deployment token is zx-4471-quebec"
TOLD = "The token is zx-4471-quebec."
CALL = SimulatedCall("recall", json.dumps({"query": "deployment token"}))
OWN = SimulatedCall("read_file", '{"path": "src/next.py"}')
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ENDPOINTS = ("responses", "messages")
Said = SimulatedAnswer | str | Problem


def looks(text: str = "Let me look.", *calls: SimulatedCall) -> SimulatedAnswer:
    """A round that recalls something."""
    return SimulatedAnswer(reasoning="I have read of a token.", text=text, calls=calls or (CALL,))


ENDS = SimulatedAnswer(reasoning="There it is.", text=TOLD)


@dataclass(slots=True)
class InOrder:
    """A model that gives the next answer each time; past the end it says that it has understood."""

    answers: list[Said] = field(default_factory=list)

    def __call__(self, request: Request) -> SimulatedAnswer | str:
        said = self.answers.pop(0) if self.answers else "Understood."
        if isinstance(said, Problem):
            raise said
        return said


@dataclass(slots=True)
class Client:
    """A conversation as the client of an endpoint has it: what it was given it sends back."""

    endpoint: str
    at: InTurns
    history: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def grow(self, steps: int, *, secret: str = SECRET) -> "Client":
        """The task, and tool steps, of which the second returns the secret."""
        self.history.append({"role": "user", "content": f"Migrate the project. {prose(60, seed=2)}"})
        for n in range(steps):
            said = prose(280, seed=100 + n)
            self.add_step(f"call_{n}", f"{said[:300]}\n{secret}\n{said[300:]}" if n == 1 else said)
        return self

    def add_step(self, name: str, result: str) -> None:
        """A call of the client's tool, and its result."""
        given = {"path": f"src/{name}.py"}
        if self.endpoint == "responses":
            self.history.append(
                {"type": "function_call", "call_id": name, "name": "read_file", "arguments": json.dumps(given)}
            )
        else:
            use = {"type": "tool_use", "id": name, "name": "read_file", "input": given}
            self.history.append({"role": "assistant", "content": [use]})
        self.answer(name, result)

    def answer(self, name: str, result: str) -> None:
        """The result of a call."""
        if self.endpoint == "responses":
            self.history.append({"type": "function_call_output", "call_id": name, "output": result})
        else:
            block = {"type": "tool_result", "tool_use_id": name, "content": result}
            self.history.append({"role": "user", "content": [block]})

    async def ask(self, question: str = "", *, stream: bool = False, **more: Any) -> Any:
        """The answer to the history and a question, which is part of the history then."""
        if question:
            self.history.append({"role": "user", "content": question})
        given = {"model": "sim", **self.options, **more}
        if self.endpoint == "responses":
            answer = await self._response(stream, given)
            self.history += [item.model_dump(exclude_none=True) for item in answer.output]
        else:
            answer = await self._message(stream, given)
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            self.history.append({"role": "assistant", "content": content})
        return answer

    async def _response(self, stream: bool, given: dict[str, Any]) -> Any:
        tool = {"type": "function", "name": "read_file", "parameters": SCHEMA}
        given = {
            "tools": [tool],
            "max_output_tokens": 512,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            **given,
        }
        async with openai.AsyncOpenAI(base_url=f"{self.at.root()}/v1", api_key="sk-test", max_retries=0) as client:
            if not stream:
                return await client.responses.create(input=self.history, **given)
            async with client.responses.stream(input=self.history, **given) as events:
                seen = [event async for event in events]
                assert [event.sequence_number for event in seen] == list(range(len(seen)))
                return await events.get_final_response()

    async def _message(self, stream: bool, given: dict[str, Any]) -> Any:
        tool = {"name": "read_file", "input_schema": SCHEMA}
        given = {"tools": [tool], "max_tokens": 512, **given}
        async with anthropic.AsyncAnthropic(base_url=self.at.root(), api_key="sk-test", max_retries=0) as client:
            if not stream:
                return await client.messages.create(messages=self.history, **given)
            async with client.messages.stream(messages=self.history, **given) as events:
                return await events.get_final_message()


@dataclass(slots=True)
class Scene:
    """A Weir with the tool that may start again, or several in turns, the upstream, and the model that plays there."""

    endpoint: str
    upstream: RunningSimulator
    model: InOrder
    folder: Path
    yaml: str
    stack: AsyncExitStack
    deployment: Deployment
    weir: InTurns | None = None

    async def start(self) -> InTurns:
        """Those on the same database."""
        await self.stack.aclose()
        options = {"yaml": self.yaml, "folder": self.folder, "window": None}
        self.weir = await self.stack.enter_async_context(self.deployment.serving(self.upstream.base_url, **options))
        return self.weir

    async def lose_store(self) -> InTurns:
        """Those on an empty database in the place of the one before."""
        await self.stack.aclose()
        if isinstance(self.deployment.store, Path):
            self.deployment = replace(self.deployment, store=self.folder / "another.db")
        else:
            connection = await asyncpg.connect(self.deployment.store)
            await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            await connection.close()
        return await self.start()

    async def client(self, steps: int = 22, *, secret: str = SECRET, **options: Any) -> Client:
        """A conversation that has outgrown its window."""
        return Client(self.endpoint, self.weir or await self.start(), options=options).grow(steps, secret=secret)

    @property
    def bodies(self) -> list[Any]:
        """The requests that the upstream has answered, in order."""
        return [seen.json() for seen in answered(self.upstream)]

    @property
    def arrays(self) -> list[list[Any]]:
        """Their histories."""
        return [body[CODECS[self.endpoint].array] for body in self.bodies]


@asynccontextmanager
async def scene(
    folder: Path,
    deployment: Deployment,
    endpoint: str,
    *answers: Said,
    recall: str = "tool: true",
    store: str = "{}",
    **settings: Any,
) -> AsyncIterator[Scene]:
    model = InOrder([*answers])
    dialect = Dialect.OPENAI if endpoint == "responses" else Dialect.ANTHROPIC
    simulated = SimulatorSettings(window=WINDOW, answer=model, dialect=dialect, **settings)
    async with serve_simulator(simulated, counter=COUNTER) as upstream, AsyncExitStack() as stack:
        yaml = f"""
upstreams: {{up: {{kind: openai, base_url: "{upstream.base_url}", api_key: pass}}}}
models: [{{match: "*", upstream: up, window: {WINDOW}}}]
auth: {{mode: open}}
store: {store}
policies: {{p: {{{json.dumps(EVICTING)[1:-1]}, placeholder: marker, recall: {{auto: false, {recall}}}}}}}
default_policy: p
"""
        yield Scene(endpoint, upstream, model, folder, yaml, stack, deployment)


def elements(answer: Any) -> list[Any]:
    """What an answer consists of."""
    return list(answer.output if hasattr(answer, "output") else answer.content)


def kinds(answer: Any) -> list[str]:
    """The kinds of its elements, in words for both endpoints."""
    names = {"reasoning": "thought", "thinking": "thought", "message": "text", "function_call": "tool_use"}
    return [names.get(element.type, element.type) for element in elements(answer)]


def calls(answer: Any) -> list[str]:
    return [element.name for element in elements(answer) if element.type in ("function_call", "tool_use")]


def texts(answer: Any) -> list[str]:
    if hasattr(answer, "output"):
        return [item.content[0].text for item in answer.output if item.type == "message"]
    return [block.text for block in answer.content if block.type == "text"]


def plain(value: Any) -> Any:
    """JSON without what an SDK adds to it or leaves out of it on the way back, and with thinking and ids as they are."""
    if isinstance(value, dict):
        return {
            k: plain(v) for k, v in value.items() if k not in ("status", "logprobs", "annotations") and v is not None
        }
    return [plain(each) for each in value] if isinstance(value, list) else value


def begins_alike(array: Sequence[Any], before: Sequence[Any]) -> bool:
    return plain(array[: len(before)]) == plain(before)


both = pytest.mark.parametrize("endpoint", ENDPOINTS)
either_way = pytest.mark.parametrize(
    ("stream", "deployment"),
    [
        pytest.param(False, 1, id="whole from one on SQLite"),
        pytest.param(True, 2, id="streamed by two in turns on PostgreSQL"),
        pytest.param(True, 1, id="streamed from one on SQLite", marks=soak),
        pytest.param(False, 2, id="whole from two in turns on PostgreSQL", marks=soak),
    ],
    indirect=["deployment"],
)


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25", "P5", "P7")
async def test_a_call_is_answered_unseen_and_goes_up_again_with_every_later_request(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks(), ENDS, bound=True) as on:
        client = await on.client()
        answer = await client.ask("Which token was it?", stream=stream)
        assert kinds(answer) == ["thought", "text", "thought", "text"]
        assert texts(answer) == ["Let me look.", TOLD]
        first, second = on.bodies
        assert first["tools"][-1] == definition_of("recall", CODECS[endpoint])
        assert {**first, "input": 0, "messages": 0} == {**second, "input": 0, "messages": 0}
        assert SECRET not in json.dumps(first)
        assert SECRET in json.dumps(second)
        assert begins_alike(on.arrays[1], on.arrays[0])
        for number in range(3):
            if number == 1:
                client.at = await on.start()
            later = await client.ask(f"And what is next, {number}?", stream=stream)
            assert getattr(later, "input_transformations", None) in (None, [])
            assert begins_alike(on.arrays[-1], on.arrays[-2])
        assert "recall" not in json.dumps(client.history)


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25", "P5")
async def test_calls_of_the_clients_own_behind_one_of_the_tool_are_asked_for_again(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    again = SimulatedAnswer(reasoning="Now the file.", calls=(OWN,))
    async with scene(tmp_path, deployment, endpoint, looks("", CALL, OWN), again) as on:
        client = await on.client()
        answer = await client.ask(stream=stream)
        assert kinds(answer) == ["thought", "thought", "tool_use"]
        assert calls(answer) == ["read_file"]
        assert getattr(answer, "stop_reason", "tool_use") == "tool_use"
        sent_back = json.dumps(on.arrays[1][len(on.arrays[0]) :])
        assert "src/next.py" not in sent_back
        [own] = [each for each in elements(answer) if each.type in ("function_call", "tool_use")]
        client.answer(getattr(own, "call_id", own.id), "def next(): pass")
        await client.ask(stream=stream)
        assert begins_alike(on.arrays[-1], on.arrays[-2])


@ALONE
@both
@pytest.mark.requirement("P5")
async def test_a_call_of_the_tool_behind_one_that_the_client_has_got_is_dropped(
    tmp_path: Path, endpoint: str, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks("", OWN, CALL)) as on:
        client = await on.client()
        answer = await client.ask(stream=True)
        assert (kinds(answer), calls(answer)) == (["thought", "tool_use"], ["read_file"])
        assert len(on.bodies) == 1


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25")
async def test_several_rounds_end_with_the_last_one_that_the_policy_allows(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    rounds = [looks(f"Round {n}.", SimulatedCall("recall", json.dumps({"query": f"module {n}"}))) for n in range(5)]
    async with scene(
        tmp_path, deployment, endpoint, *rounds[:4], recall="tool: true, rounds: 2, max_tokens: 300"
    ) as on:
        client = await on.client()
        answer = await client.ask(stream=stream)
        assert len(on.bodies) == 4
        assert texts(answer) == [f"Round {n}." for n in range(4)]
        assert calls(answer) == []
        assert getattr(answer, "stop_reason", "end_turn") == "end_turn"
        sent = json.dumps(on.arrays[-1])
        assert sent.count("this was the last call") == sent.count("no further call") == 1
        await client.ask("Go on.", stream=stream)
        assert begins_alike(on.arrays[-1], on.arrays[-2])


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25", "P5")
async def test_reasoning_that_led_to_a_call_that_is_not_answered_any_more_is_not_left_without_it(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    silent = [looks("", CALL) for _ in range(3)]
    async with scene(tmp_path, deployment, endpoint, *silent, recall="tool: true, rounds: 1, max_tokens: 300") as on:
        client = await on.client()
        answer = await client.ask(stream=stream)
        assert kinds(answer) == ["thought"] * 3
        later = await client.ask("Go on.", stream=stream)
        assert texts(later) == ["Understood."]
        assert begins_alike(on.arrays[-1], on.arrays[-2])
        assert json.dumps(on.arrays[-1]).count("no further call") == 2


@either_way
@pytest.mark.requirement("A4.25", "P5")
async def test_a_stored_answer_is_gone_on_from_with_all_of_its_rounds(
    tmp_path: Path, stream: bool, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, "responses", looks(), ENDS) as on:
        client = await on.client()
        answer = await client.ask(stream=stream, store=True)
        client.history = []
        later = await client.ask("And which gateway?", stream=stream, store=True, previous_response_id=answer.id)
        assert texts(later) == ["Understood."]
        assert "recall" not in json.dumps(on.bodies[-1]["tools"])


@ALONE
@pytest.mark.requirement("A4.25", "P5")
async def test_a_stored_stream_has_one_id_and_is_gone_on_from_under_it(tmp_path: Path, deployment: Deployment) -> None:
    """openai 3.54 raises "Lifecycle response identity changed." where a stream ends under another id."""
    async with scene(tmp_path, deployment, "responses", looks(), ENDS, "Of no other.", "Of none.") as on:
        client = await on.client()
        body = {"model": "sim", "stream": True, "store": True, "max_output_tokens": 512, "input": client.history}
        async with httpx.AsyncClient(timeout=30, headers=HEADERS) as http:
            told = (await http.post(f"{client.at.root()}/v1/responses", json=body)).text
            events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
            (name,) = {event["response"]["id"] for event in events if "response" in event}
            for _ in range(2):
                asked = {"model": "sim", "input": "Of which gateway?", "previous_response_id": name}
                later = await http.post(f"{client.at.root()}/v1/responses", json=asked)
                assert later.status_code == 200, later.text
                assert "restart=1" in later.headers["x-weir-actions"]
        whole = json.dumps(on.bodies[-2]["input"])
        assert TOLD in whole
        assert "Of which gateway?" in whole


@SHARED
@both
@pytest.mark.requirement("A4.25")
async def test_the_tool_is_not_offered_where_its_rounds_would_not_outlive_a_restart(
    tmp_path: Path, endpoint: str, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, store="{content: digest}") as on:
        await (await on.client()).ask()
        assert "recall" not in json.dumps(on.bodies[-1]["tools"])


@both
@either_way
@pytest.mark.requirement("P5")
async def test_usage_has_the_prompt_of_the_last_round_and_the_words_of_all(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks(), ENDS) as on:
        client = await on.client()
        usage = (await client.ask(stream=stream)).usage
        seen = answered(on.upstream)
        whole = usage.input_tokens
        if endpoint == "messages":
            whole += (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert whole == seen[1].prompt_tokens > seen[0].prompt_tokens
        assert usage.output_tokens == sum(each.completion_tokens for each in seen)


@ALONE
@both
@pytest.mark.parametrize("last", ["answers", "falls over"])
@pytest.mark.requirement("P7")
async def test_the_usage_of_a_key_has_every_round_that_its_provider_bills(
    tmp_path: Path, endpoint: str, last: str, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks(), ENDS if last == "answers" else FELL) as on:
        client = await on.client()
        with suppress(openai.InternalServerError, anthropic.InternalServerError):
            await client.ask()
        told, billed = {"requests": 0}, [each for each in answered(on.upstream) if each.status == 200]
        async with httpx.AsyncClient(base_url=client.at.root(), headers=HEADERS) as http:
            while not told["requests"]:
                await asyncio.sleep(0.05)
                told = (await http.get("/weir/usage")).json()["total"]
        assert len(billed) == (2 if last == "answers" else 1)
        assert told["prompt"] == sum(each.prompt_tokens for each in billed)
        cached = sum(each.cached_tokens for each in billed)
        assert told["cached"] == (cached if endpoint == "responses" else 0), "on Messages only what is marked"
        assert told["completion"] == sum(each.completion_tokens for each in billed)


@ALONE
@both
@pytest.mark.requirement("P5")
async def test_a_stream_is_one_answer_with_the_numbers_of_one(
    tmp_path: Path, endpoint: str, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks(), ENDS) as on:
        client = await on.client()
        events = await raw_events(client)
        assert [event for event, value in events if event != value["type"]] == []
        names = [event for event, _ in events]
        if endpoint == "responses":
            assert [value["sequence_number"] for _, value in events] == list(range(len(events)))
            added = [value["output_index"] for name, value in events if name == "response.output_item.added"]
            ids = {value["response"]["id"] for _, value in events if "response" in value}
            ends = ("response.created", "response.completed")
        else:
            added = [value["index"] for name, value in events if name == "content_block_start"]
            ids = {value["message"]["id"] for _, value in events if "message" in value}
            ends = ("message_start", "message_stop")
        assert added == [0, 1, 2, 3]
        assert len(ids) == 1
        assert (names[0], names[-1]) == ends
        assert [names.count(name) for name in ends] == [1, 1]


async def raw_events(client: Client, **more: Any) -> list[tuple[str, Any]]:
    """The events of a stream as they came, by name."""
    body = {"model": "sim", "stream": True, **more}
    if client.endpoint == "responses":
        body |= {"input": client.history, "max_output_tokens": 512, "store": False}
    else:
        body |= {"messages": client.history, "max_tokens": 512}
    found, text, url = [], "", f"{client.at.root()}/v1/{client.endpoint}"
    async with httpx.AsyncClient(timeout=30) as http, http.stream("POST", url, json=body, headers=HEADERS) as answer:
        with suppress(httpx.RemoteProtocolError):
            async for piece in answer.aiter_text():
                text += piece
    for part in text.strip().split("\n\n"):
        name, _, data = part.partition("\n")
        if name.startswith("event: "):
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


HEADERS = {"authorization": "Bearer sk-test", "anthropic-version": "2023-06-01"}
FELL = Problem(status=500, message="the model fell over")


@each_once
@both
@either_way
@pytest.mark.requirement("P4", "P5")
async def test_an_upstream_that_fails_in_a_later_round_says_so_itself_and_nothing_of_it_stays(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    quietly = SimulatedAnswer(calls=(CALL,))
    async with scene(tmp_path, deployment, endpoint, quietly, FELL, quietly, ENDS) as on:
        client = await on.client()
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as failed:
            await client.ask(stream=stream)
        assert failed.value.status_code == 500
        answer = await client.ask(stream=stream)
        assert texts(answer) == [TOLD]
        await client.ask("And now?", stream=stream)
        assert begins_alike(on.arrays[-1], on.arrays[-2])


@each_once
@both
@either_way
@pytest.mark.requirement("P4", "A4.25")
async def test_an_upstream_that_refuses_the_round_itself_is_asked_as_if_there_were_no_tool(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    refuses = Problem(status=422, message="this is not taken here")
    async with scene(tmp_path, deployment, endpoint, looks(), refuses, ENDS) as on:
        client = await on.client()
        answer = await client.ask(stream=stream)
        assert texts(answer) == ["Let me look.", TOLD]
        first, _, plain_one = on.bodies
        assert plain_one == {**first, "tools": first["tools"][:-1]}
        await client.ask("And now?", stream=stream)
        assert "zx-4471-quebec.\n" not in json.dumps(on.arrays[-1])
        assert "recall:" not in json.dumps(on.arrays[-1])


@each_once
@both
@either_way
@pytest.mark.requirement("P4", "A4.25")
async def test_a_round_that_is_too_long_is_asked_with_less_and_kept_as_it_was_answered(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint) as on:
        client = await on.client(secret="\n".join(f"{SECRET} number {n} and more words" for n in range(220)))
        await client.ask()
        taken = answered(on.upstream)[-1].prompt_tokens
        on.model.answers = [looks(), ENDS]
        settings = on.upstream.simulator.model.settings
        object.__setattr__(settings, "window", taken + 512 + 2_400)
        await client.ask("Which token was it?", stream=stream)
        object.__setattr__(settings, "window", WINDOW)
        assert [seen.status for seen in asked(on)] == [200, 200, 400, 200]
        sizes = [len(json.dumps(array(seen))) for seen in asked(on)]
        assert sizes[3] < sizes[2]
        await client.ask("And now?", stream=stream)
        assert begins_alike(on.arrays[-1], on.arrays[-2])


@ALONE
@both
@pytest.mark.requirement("P5", "R.35")
async def test_an_upstream_that_fails_once_something_was_shown_ends_the_stream_in_its_own_grammar(
    tmp_path: Path, endpoint: str, deployment: Deployment
) -> None:
    async with scene(tmp_path, deployment, endpoint, looks(), FELL) as on:
        events = await raw_events(await on.client())
        last, value = events[-1]
        if endpoint == "responses":
            assert last == "response.failed"
            assert [value["sequence_number"] for _, value in events] == list(range(len(events)))
            assert value["response"]["id"] == events[0][1]["response"]["id"]
            assert [item["type"] for item in value["response"]["output"]] == ["reasoning", "message"]
            assert "fell over" in value["response"]["error"]["message"]
        else:
            assert last == "error"
            assert "fell over" in value["error"]["message"]


@ALONE
@both
@pytest.mark.requirement("P5", "P8")
async def test_a_client_that_leaves_in_a_later_round_ends_it_and_nothing_of_it_stays(
    tmp_path: Path, endpoint: str, deployment: Deployment
) -> None:
    slowly = SimulatedAnswer(text=" ".join(["word"] * 200))
    async with scene(tmp_path, deployment, endpoint, looks("Wait."), slowly, chunk_delay=0.02) as on:
        client = await on.client()
        body = {"model": "sim", "stream": True, "max_tokens": 512, "messages": client.history}
        if endpoint == "responses":
            body = {"model": "sim", "stream": True, "max_output_tokens": 512, "input": client.history}
        url = f"{client.at.root()}/v1/{endpoint}"
        async with httpx.AsyncClient(timeout=30) as http, http.stream("POST", url, json=body, headers=HEADERS) as got:
            text = ""
            async for part in got.aiter_text():
                text += part
                if text.count("word") > 3:
                    break
        for _ in range(200):
            if any(seen.client_gone for seen in answered(on.upstream)):
                break
            await asyncio.sleep(0.02)
        assert [seen.client_gone for seen in answered(on.upstream)] == [False, True]
        await client.ask()
        assert begins_alike(on.arrays[-1], on.arrays[0])
        assert "zx-4471" not in json.dumps(on.arrays[-1])


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25", "P9")
async def test_a_conversation_goes_on_whose_hidden_rounds_were_lost_with_the_store(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    again = SimulatedAnswer(reasoning="On to the next file.", text="Reading.", calls=(OWN,))
    script = [looks(""), looks(""), SimulatedAnswer(reasoning="There it is.", text=TOLD, calls=(OWN,)), again, again]
    async with scene(tmp_path, deployment, endpoint, *script) as on:
        client = await on.client()
        answer = await client.ask("Which token?", stream=stream)
        assert kinds(answer).count("thought") == 3
        [own] = [each for each in elements(answer) if each.type in ("function_call", "tool_use")]
        client.answer(getattr(own, "call_id", own.id), "It is empty.")
        client.at = await on.lose_store()
        for _ in range(2):
            answer = await client.ask(stream=stream)
            assert texts(answer) == ["Reading."]
            [own] = [each for each in elements(answer) if each.type in ("function_call", "tool_use")]
            client.answer(getattr(own, "call_id", own.id), "It is empty.")
        assert [each.status for each in asked(on) if each.status != 200] == [400]  # once, unseen by the client


@each_once
@both
@either_way
@pytest.mark.requirement("A4.25", "P5")
async def test_a_long_run_on_bound_reasoning_is_never_refused_for_what_weir_has_recalled_in_it(
    tmp_path: Path, endpoint: str, stream: bool, deployment: Deployment
) -> None:
    def step(n: int) -> SimulatedAnswer:
        call = SimulatedCall("read_file", json.dumps({"path": f"src/{n}.py"}))
        return SimulatedAnswer(reasoning=f"Module {n} is next.", text=f"Step {n}.", calls=(call,))

    script: list[Said] = [step(n) for n in range(STEPS)]
    for place in (13, 11, 10):
        script.insert(place, looks("", SimulatedCall("recall", json.dumps({"query": f"module {place % 3}"}))))
    async with scene(tmp_path, deployment, endpoint, *script, recall="tool: true, max_tokens: 400", bound=True) as on:
        client = Client(endpoint, await on.start(), options={"model": BINDING})
        client.history.append({"role": "user", "content": f"Migrate the project. {prose(60, seed=2)}"})
        made: list[tuple[int, list[str], list[Any]]] = []
        for n in range(STEPS):
            if n == 12:
                client.at = await on.start()
            answer = await client.ask(stream=stream)
            assert calls(answer) == ["read_file"]
            [own] = [each for each in elements(answer) if each.type in ("function_call", "tool_use")]
            client.answer(getattr(own, "call_id", own.id), prose(560, seed=100 + n))
            thoughts = [each.id for each in elements(answer) if each.type == "reasoning"]
            made.append((len(asked(on)), thoughts, getattr(answer, "input_transformations", None) or []))
        seen = asked(on)
        assert [each.status for each in seen] == [200] * (STEPS + 3)
        changes = [n for n in range(1, len(seen)) if not begins_alike(array(seen[n]), array(seen[n - 1]))]
        assert 0 < len(changes) <= 3
        valid = {name for number, thoughts, _ in made for name in thoughts if number > changes[-1]}
        assert valid or endpoint == "messages"
        assert valid.isdisjoint(each["id"] for each in made[-1][2])


STEPS = 16
BINDING = "claude-opus-5-5"


def asked(on: Scene) -> list[Any]:
    """What was asked of the endpoint, and how that went."""
    return [each for each in on.upstream.ledger if each.method == "POST" and each.path.endswith(on.endpoint)]


def array(seen: Any) -> list[Any]:
    """The history of a request."""
    body = seen.json()
    return list(body.get("input") or body["messages"])
