"""Histories that the provider holds: followed while there is room, begun anew when there is none."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from proxy.wire.responses import RESPONSES
from tests.functional.harness import COUNTER, SHARED, Deployment, RunningWeir, WeirProcess, free_port, prose, weir
from tests.upstream import Dialect, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

STEPS = 40
ANTHROPIC = {"dialect": Dialect.ANTHROPIC}
READ = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
RESULT = re.compile(r"result (\d+):")
TASK = "Migrate the project from axios to fetch. " + prose(60, seed=2)


def say(request: dict[str, Any], steps: int = STEPS) -> SimulatedAnswer:
    """Another file to read, told by the number of the newest result, until the task is done."""
    found = RESULT.search(json.dumps(request["messages"][-1]))
    step = int(found[1]) if found else 0
    if step >= steps:
        return SimulatedAnswer(reasoning="That was all.", text="It is done.")
    call = SimulatedCall("read_file", json.dumps({"path": f"src/module_{step + 1}.py"}))
    return SimulatedAnswer(reasoning="One more file.", calls=(call,))


@asynccontextmanager
async def upstream(steps: int = STEPS, **settings: Any) -> AsyncIterator[RunningSimulator]:
    answer = partial(say, steps=steps)
    async with serve_simulator(SimulatorSettings(answer=answer, **settings), counter=COUNTER) as running:
        yield running


def result_of(call: Any, step: int) -> dict[str, Any]:
    return {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": f"result {step}: {prose(280, seed=step)}",
    }


class Chained:
    """An agent that sends its provider only what is new; ``sent`` are its bodies as they left it."""

    def __init__(self, *clients: Any, streams: bool = False) -> None:
        self.clients = clients
        self.streams = streams
        self.headers: list[Mapping[str, str]] = []
        self.sent: list[bytes] = []
        self.last: Any = None
        for client in clients:
            client._client.event_hooks["request"] = [self.note]

    async def note(self, request: Any) -> None:
        self.sent.append(request.content)

    @property
    def restarts(self) -> int:
        return sum("restart=1" in each["x-weir-actions"] for each in self.headers)

    async def ask(self, given: Any, **options: Any) -> Any:
        asked = {"model": "sim", "tools": [READ], "input": given, "max_output_tokens": 512, **options}
        if self.last is not None:
            asked.setdefault("previous_response_id", self.last.id)
        responses = self.clients[len(self.sent) % len(self.clients)].responses
        if self.streams:
            async with responses.stream(**asked) as stream:
                self.last = await stream.get_final_response()
                self.headers.append(stream._raw_stream.response.headers)
        else:
            raw = await responses.with_raw_response.create(**asked)
            self.last = raw.parse()
            self.headers.append(raw.headers)
        return self.last

    async def steps(self, until: int, *, start: int = 0) -> Any:
        """Go on from step ``start``, whose answer was the last one, or with the task."""
        answer = await self.ask(TASK) if start == 0 else self.last
        for step in range(start + 1, until + 1):
            calls = [item for item in answer.output if item.type == "function_call"]
            answer = await self.ask([result_of(call, step) for call in calls])
        return answer


def instead(answer: Any, text: str) -> list[Any]:
    """A message in place of more results than those of the calls that are open."""
    calls = [item for item in answer.output if item.type == "function_call"]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "stopped"} for call in calls]
    return [*given, {"role": "user", "content": text}]


def bodies(simulator: RunningSimulator) -> list[bytes]:
    return [each.body for each in simulator.answered()]


def is_linked(body: bytes) -> bool:
    return "previous_response_id" in json.loads(body)


@pytest.mark.requirement("A0.3", "R.25")
@pytest.mark.parametrize(("streams", "steps"), [(False, STEPS), (True, 18)], ids=["whole", "streamed"])
async def test_a_chain_of_many_steps_goes_through_a_small_window(streams: bool, steps: int) -> None:
    async with upstream(steps) as simulator, weir(simulator.base_url) as running:
        agent = Chained(running.client(), streams=streams)
        answer = await agent.steps(steps)
        assert answer.output_text == "It is done."
        assert 1 <= agent.restarts <= 4
        assert [each.status for each in simulator.answered()] == [200] * (steps + 1)
        for sent, arrived, headers in zip(agent.sent, bodies(simulator), agent.headers, strict=True):
            restarted = "restart=1" in headers["x-weir-actions"]
            assert restarted != (arrived == sent)
            assert is_linked(arrived) == (is_linked(sent) and not restarted)
        assert len({each["x-weir-conversation"] for each in agent.headers}) == 1


async def test_a_chain_goes_on_in_a_process_that_was_started_anew(tmp_path: Path) -> None:
    arguments = ["--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}", "--window", "8192"]
    async with upstream() as simulator:
        process = WeirProcess(["--upstream", simulator.base_url, *arguments], free_port())
        async with process:
            agent = Chained(process.client(), streams=True)
            await agent.steps(8)
            await process.stop()
            await process.start()
            answer = await agent.steps(18, start=8)
        assert agent.restarts == 1
        assert answer.output[-1].type == "function_call"
        assert [each.status for each in simulator.answered()] == [200] * 19


@pytest.mark.requirement("R.25")
async def test_two_go_on_from_one_answer_each_with_its_own_history() -> None:
    async with upstream() as simulator, weir(simulator.base_url) as running:
        agent = Chained(running.client())
        await agent.steps(4)
        fork = Chained(running.client())
        fork.last = agent.last
        await agent.steps(18, start=4)
        assert agent.restarts == 1
        given = await fork.ask(instead(fork.last, "Where is the moon? " + prose(1500, seed=77)))
        assert fork.restarts == 0
        assert bodies(simulator)[-1] == fork.sent[-1]
        await fork.ask(instead(given, "And Mars? " + prose(2600, seed=78)))
        assert fork.restarts == 1
        whole = bodies(simulator)[-1].decode()
        assert "And Mars?" in whole
        assert "result 5:" not in whole


async def test_what_the_client_deletes_is_known_no_more(tmp_path: Path) -> None:
    async with upstream() as simulator, weir(simulator.base_url, tmp_path / "w.db") as running:
        client = running.client()
        agent = Chained(client)
        first = await agent.ask(TASK)
        await agent.ask(instead(first, "Go on."))
        tenant = next(iter(running.runtime.answers._rows))[0]
        await running.stored()
        assert await running.runtime.store.known_answers(tenant, [first.id]) == 1
        await client.responses.delete(first.id)
        assert await running.runtime.store.known_answers(tenant, [first.id]) == 0
        assert await running.runtime.answers.behind(tenant, agent.last.id) == ()
        await agent.ask(instead(agent.last, "And on."))
        assert bodies(simulator)[-1] == agent.sent[-1]
        assert "x-weir-conversation" not in agent.headers[-1]


@pytest.mark.requirement("S.24")
async def test_a_deleted_conversation_takes_its_answers_with_it(tmp_path: Path) -> None:
    async with upstream() as simulator, weir(simulator.base_url, tmp_path / "w.db") as running:
        agent = Chained(running.client())
        await agent.steps(2)
        await running.stored()
        (row,) = await running.runtime.store.conversations(None)
        assert len((await running.runtime.store.export(row))["answers"]) == 3
        headers = {"authorization": "Bearer sk-test"}
        async with httpx.AsyncClient(headers=headers) as client:
            gone = await client.delete(f"{running.root}/weir/conversations/{row.id}")
        assert gone.status_code == 200
        assert await running.runtime.answers.behind(row.tenant, agent.last.id) == ()


@pytest.mark.requirement("S.1")
async def test_another_tenant_knows_nothing_of_an_answer() -> None:
    async with upstream(foreign=True) as simulator, weir(simulator.base_url) as running:
        theirs = Chained(running.client())
        answer = await theirs.steps(12)
        mine = Chained(running.client("sk-other"))
        mine.last = answer
        call = next(item for item in answer.output if item.type == "function_call")
        await mine.ask([result_of(call, 13)])
        name, (tenant, _) = answer.output[0].id, next(iter(running.runtime.answers._rows))
        assert await running.runtime.answers.elements(tenant, [name], RESPONSES)
        assert not await running.runtime.answers.elements("another", [name], RESPONSES)
        assert bodies(simulator)[-1] == mine.sent[-1]
        assert "x-weir-conversation" not in mine.headers[-1]


@SHARED
async def test_whichever_process_is_asked_knows_the_chain(deployment: Deployment) -> None:
    async with upstream() as simulator, deployment.serving(simulator.base_url) as weirs:
        agent = Chained(*(each.client() for each in weirs.weirs))
        await agent.steps(18)
        assert agent.restarts == 1
        assert len({each["x-weir-conversation"] for each in agent.headers}) == 1
        if deployment.count > 1:
            await agent.clients[0].responses.delete(agent.last.id)
            tenant = next(iter(weirs.weirs[0].runtime.answers._rows))[0]
            assert await weirs.weirs[1].runtime.answers.behind(tenant, agent.last.id) == ()


class Naming:
    """A client that sends everything, but of what the model said only the names, as Vercel's SDK does."""

    def __init__(self, client: Any, *, bare: bool = False) -> None:
        self.client = client
        self.bare = bare
        self.items: list[Any] = [{"role": "user", "content": TASK}]
        self.headers: list[Mapping[str, str]] = []
        self.sent: list[bytes] = []
        self.last: Any = None
        client._client.event_hooks["request"] = [self.note]

    async def note(self, request: Any) -> None:
        self.sent.append(request.content)

    async def step(self, number: int, *, linked: bool = False) -> None:
        """One more step; a ``linked`` one goes on from the last answer and names nothing."""
        link = {"previous_response_id": self.last.id} if linked and self.last is not None else {}
        if link:
            self.items = [item for item in self.items if item.get("type") == "function_call_output"][-1:]
        raw = await self.client.responses.with_raw_response.create(
            model="sim", tools=[READ], input=self.items, max_output_tokens=512, **link
        )
        self.headers.append(raw.headers)
        self.last = raw.parse()
        for item in self.last.output:
            if item.type == "function_call":
                named = ("call_id", "name", "arguments", "type")
                self.items.append({name: getattr(item, name) for name in named})
                self.items.append(result_of(item, number))
            else:
                self.items.append({"id": item.id} if self.bare else {"type": "item_reference", "id": item.id})


@pytest.mark.requirement("S.1")
async def test_another_tenants_items_and_threads_are_known_to_nobody_else() -> None:
    async with upstream() as simulator, weir(simulator.base_url) as running:
        theirs = Naming(running.client())
        for step in range(1, 20):
            await theirs.step(step)
        assert any("compact" in each["x-weir-actions"] for each in theirs.headers)
        mine = Naming(running.client("sk-other"))
        mine.items = list(theirs.items)
        with pytest.raises(openai.NotFoundError):
            await mine.step(20)
        tenants = {tenant for tenant, _ in running.runtime.answers._rows}
        assert len(tenants) == 1  # an answer of theirs is on no record of mine
        assert b"One more file." not in bodies(simulator)[-1]
    async with upstream(18, **ANTHROPIC) as simulator, weir(simulator.base_url) as running:
        await run_tools(running)
        last = json.loads(simulator.answered()[-1].body)
        assert last["thread"]["type"] == "continue"
        headers = {"x-api-key": "sk-other", "anthropic-version": "2023-06-01", "anthropic-beta": "threads-2026-10-21"}
        async with httpx.AsyncClient(headers=headers) as client:
            answer = await client.post(f"{running.root}/v1/messages", json=last)
        assert answer.status_code == 404
        assert answer.json()["error"]["details"]["error_code"] == "thread_not_found"
        assert json.loads(simulator.answered()[-1].body) == last


async def run_tools(running: RunningWeir | WeirProcess, *, key: str = "sk-test", stream: bool = False) -> Any:
    """The last message of the SDK's own agent, which keeps a thread by itself."""
    done = 0

    @anthropic.beta_async_tool
    async def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: where it is.
        """
        nonlocal done
        done += 1
        return f"result {done}: {path} {prose(280, seed=done)}"

    async with anthropic.AsyncAnthropic(base_url=running.root, api_key=key, max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="sim",
            max_tokens=512,
            system="You are careful.",
            tools=[read_file],
            messages=[{"role": "user", "content": TASK}],
            stream=stream,
        )
        last = None
        async for each in runner:
            last = await each.get_final_message() if stream else each
        return last


def threads_of(simulator: RunningSimulator) -> list[str | None]:
    sent = [json.loads(each.body) for each in simulator.answered()]
    return [(body.get("thread") or {}).get("type") for body in sent]


@pytest.mark.requirement("A0.3")
@pytest.mark.parametrize(("stream", "steps"), [(False, 18), (True, STEPS)], ids=["whole", "streamed"])
async def test_a_thread_of_many_steps_goes_through_a_small_window(stream: bool, steps: int) -> None:
    async with upstream(steps, **ANTHROPIC) as simulator, weir(simulator.base_url) as running:
        last = await run_tools(running, stream=stream)
        assert last.content[-1].text == "It is done."
        threads = threads_of(simulator)
        assert [each.status for each in simulator.answered()] == [200] * len(threads)
        assert threads.count("continue") + threads.count("create") == steps + 1
        assert 2 <= threads.count("create") <= 5


async def test_a_thread_that_is_refused_goes_on_with_everything() -> None:
    async with (
        upstream(18, **ANTHROPIC) as simulator,
        weir(simulator.base_url, balanced={"server_state": "refuse"}) as running,
    ):
        last = await run_tools(running)
        assert last.content[-1].text == "It is done."
        assert set(threads_of(simulator)) == {None}
        assert [each.status for each in simulator.answered()] == [200] * 19
