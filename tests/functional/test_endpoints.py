"""Agents of the real SDKs on ``/v1/responses`` and ``/v1/messages``, through Weir, against a provider that is strict."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, SHARED, Deployment, RunningWeir, prose, weir
from tests.profile import each_once
from tests.upstream import Dialect, RecordedRequest, RunningSimulator, SimulatedAnswer, SimulatorSettings
from tests.upstream.app import serve_simulator
from tests.upstream.delivery import SummaryWriter

pytestmark = pytest.mark.slow

STEPS = 30
WINDOW = 8_192
SHAPE = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TASK = "Migrate the project from axios to fetch. " + prose(60, seed=2)


def words_of(step: int) -> int:
    """Results of 300 to 900 tokens."""
    return 190 + 53 * step % 380


@dataclass
class Agent:
    """A client's loop: asks, does what it is told, asks again with all of it."""

    base_url: str
    model: str = "sim"
    streams: bool = False
    key: str = "sk-test"
    options: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    words: Callable[[int], int] = words_of
    number: int = 0
    client: Any = None

    opened: ClassVar[list[Any]] = []

    def __post_init__(self) -> None:
        self.history = [{"role": "user", "content": TASK}]
        self.connect()

    def connect(self) -> None:
        self.client = self.connected()
        self.opened.append(self.client)

    def connected(self) -> Any:
        raise NotImplementedError

    async def run(self, most: int = STEPS + 1) -> Any:
        """Until there is nothing more to do, or ``most`` answers are there."""
        for _ in range(most):
            answer = await self.ask()
            if not self.take(answer):
                break
        return answer

    def result(self) -> str:
        self.number += 1
        return prose(self.words(self.number), seed=7_000 + self.number)

    async def ask(self) -> Any:
        raise NotImplementedError

    def take(self, answer: Any) -> bool:
        raise NotImplementedError


class OnResponses(Agent):
    """The ``openai`` SDK, without state at the provider."""

    path = "/v1/responses"
    tool: Mapping[str, Any] = {"type": "function", "name": "read_file", "parameters": SHAPE, "strict": False}

    def connected(self) -> Any:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, max_retries=0)

    async def ask(self) -> Any:
        asked = {
            "model": self.model,
            "instructions": "Be careful.",
            "input": self.history,
            "tools": [self.tool],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 512,
            **self.options,
        }
        if self.streams:
            async with self.client.responses.stream(**asked) as stream:
                answer = await stream.get_final_response()
                self.actions.append(stream._raw_stream.response.headers.get("x-weir-actions", ""))
        else:
            raw = await self.client.responses.with_raw_response.create(**asked)
            self.actions.append(raw.headers.get("x-weir-actions", ""))
            answer = raw.parse()
        self.answers.append(answer)
        return answer

    def take(self, answer: Any) -> bool:
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        self.history += [item.model_dump(exclude_none=True) for item in answer.output]
        for item in self.history:
            item.pop("parsed_arguments", None)
            for part in item["content"] if isinstance(item.get("content"), list) else ():
                part.pop("parsed", None)
        self.history += [{"type": "function_call_output", "call_id": name, "output": self.result()} for name in calls]
        return bool(calls)

    @staticmethod
    def said(answer: Any) -> str:
        return str(answer.output_text)


class OnMessages(Agent):
    """The ``anthropic`` SDK."""

    path = "/v1/messages"
    tool: Mapping[str, Any] = {"name": "read_file", "input_schema": SHAPE}

    def connected(self) -> Any:
        return anthropic.AsyncAnthropic(base_url=self.base_url, api_key=self.key, max_retries=0)

    async def ask(self) -> Any:
        asked = {
            "model": self.model,
            "system": "Be careful.",
            "messages": self.history,
            "tools": [self.tool],
            "max_tokens": 512,
            "thinking": {"type": "adaptive"},
            **self.options,
        }
        if self.streams:
            async with self.client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
                self.actions.append(stream.response.headers.get("x-weir-actions", ""))
        else:
            raw = await self.client.messages.with_raw_response.create(**asked)
            self.actions.append(raw.headers.get("x-weir-actions", ""))
            answer = await raw.parse()
        self.answers.append(answer)
        return answer

    def take(self, answer: Any) -> bool:
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        self.history.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
        if calls:
            results = [{"type": "tool_result", "tool_use_id": name, "content": self.result()} for name in calls]
            self.history.append({"role": "user", "content": results})
        return bool(calls)

    @staticmethod
    def said(answer: Any) -> str:
        return "".join(block.text for block in answer.content if block.type == "text")


AGENTS: tuple[type[Agent], ...] = (OnResponses, OnMessages)
MODELS: Mapping[type[Agent], str] = {OnResponses: "sim", OnMessages: "claude-opus-4-1"}
"""Models whose thinking is bound to nothing."""
BOTH = pytest.mark.parametrize("kind", AGENTS, ids=["responses", "messages"])


@pytest.fixture(autouse=True)
async def clients_are_closed() -> AsyncIterator[None]:
    yield
    while Agent.opened:
        await Agent.opened.pop().close()


@asynccontextmanager
async def upstream(kind: type[Agent], **options: Any) -> AsyncIterator[RunningSimulator]:
    dialect = Dialect.OPENAI if kind is OnResponses else Dialect.ANTHROPIC
    settings = SimulatorSettings(**{"window": WINDOW, "dialect": dialect, "steps": STEPS, **options})
    async with serve_simulator(settings, counter=COUNTER) as running:
        yield running


@asynccontextmanager
async def between(
    kind: type[Agent], *, simulated: Mapping[str, Any] = {}, **options: Any
) -> AsyncIterator[tuple[RunningSimulator, RunningWeir]]:
    async with (
        upstream(kind, **simulated) as simulator,
        weir(simulator.base_url, **{"window": WINDOW, **options}) as running,
    ):
        yield simulator, running


def refused(simulator: "RunningSimulator | Played") -> list[int]:
    """The statuses of what the upstream did not answer."""
    return [seen.status for seen in simulator.ledger if seen.status != 200]


def sent(simulator: "RunningSimulator | Played") -> list[dict[str, Any]]:
    """The bodies that it answered."""
    return [seen.json() for seen in simulator.ledger if seen.status == 200]


@dataclass(frozen=True)
class Played:
    """A loop that has ended: the client that ran it, its last answer, and what reached the upstream."""

    agent: Agent
    answer: Any
    ledger: Sequence[RecordedRequest]


PLAYED: dict[type[Agent], Played] = {}


async def played(kind: type[Agent]) -> Played:
    """The whole loop of a client that does not stream, played once for all tests that only look at it."""
    if kind not in PLAYED:
        async with between(kind) as (simulator, running):
            agent = kind(running.root, model=MODELS[kind])
            PLAYED[kind] = Played(agent, await agent.run(), simulator.ledger)
    return PLAYED[kind]


@BOTH
@pytest.mark.requirement("A0.3", "P3", "P5")
async def test_a_loop_of_thirty_steps_goes_through_a_window_that_it_does_not_fit(kind: type[Agent]) -> None:
    """Whole and streamed, with two parallel calls at first; both say the same. Without Weir it ends in the middle."""
    async with between(kind) as (simulator, running):
        agent = kind(running.root, model=MODELS[kind], streams=True)
        streamed, whole = Played(agent, await agent.run(), simulator.ledger), await played(kind)
        for each in (whole, streamed):
            assert each.agent.number == STEPS + 1
            assert kind.said(each.answer)
            assert any(actions != "none" for actions in each.agent.actions)
            assert refused(each) == []
        direct = kind(simulator.origin)
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
            await direct.run()
        assert direct.number < STEPS
    assert shapes_of(whole) == shapes_of(streamed)


def shapes_of(loop: Played) -> list[Any]:
    """What its answers say, without ids and seals."""
    return [_shape_of(each.model_dump(exclude={"id", "created_at"})) for each in loop.agent.answers]


def _shape_of(answer: Mapping[str, Any]) -> Any:
    parts = answer.get("output") or answer["content"]
    texts = [(p["type"], p.get("name"), p.get("arguments") or p.get("input"), p.get("thinking")) for p in parts]
    return texts, answer.get("status"), answer.get("stop_reason"), answer["usage"]["output_tokens"]


@BOTH
@pytest.mark.requirement("P3", "P2")
async def test_thinking_that_is_bound_to_what_stands_before_it_stays_valid(kind: type[Agent]) -> None:
    """A model that is known to bind, and one that is found to: no answer is refused, and what was thought behind a
    batch goes up unchanged from then on."""
    models = ["claude-opus-5-5", "claude-x"] if kind is OnMessages else ["sim"]
    async with between(kind, simulated={"bound": True}) as (simulator, running):
        for model in models:
            agent = kind(running.root, model=model, key=f"sk-{model}", streams=model == "claude-x")
            answer = await agent.run()
            assert kind.said(answer)
            assert agent.number == STEPS + 1
            bodies = [seen.json() for seen in simulator.ledger if seen.status == 200 and seen.model == model]
            assert len(bodies) == STEPS + 1
            body, last = bodies[-1], agent.answers[-1].model_dump()
            given = agent.history if kind is OnResponses else thoughts({"messages": agent.history})
            given = [each for each in given if each.get("type") in ("reasoning", "thinking")][-3:]
            there = body["input"] if kind is OnResponses else thoughts(body)
            assert [each for each in there if each.get("type") in ("reasoning", "thinking")][-3:] == given[-3:]
            dropped = {each["id"] for each in last.get("input_transformations") or ()}
            assert not dropped & {each.get("id") for each in given}
        # the first batch of a model that nobody knows yet to bind is what tells of it
        assert refused(simulator) == [400] * (len(models) - 1)


@pytest.mark.requirement("P3", "P4")
@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
async def test_thinking_that_is_bound_to_nothing_stays_as_the_model_gave_it(thinking: Mapping[str, Any]) -> None:
    """What was thought since the last message of the user: nothing of it goes while its step stays."""
    if thinking["type"] == "adaptive":
        loop = await played(OnMessages)
    else:
        async with between(OnMessages) as (simulator, running):
            options = {"thinking": thinking, "max_tokens": 2_048}
            agent: Agent = OnMessages(running.root, model=MODELS[OnMessages], options=options)
            loop = Played(agent, await agent.run(), simulator.ledger)
    agent = loop.agent
    assert OnMessages.said(loop.answer)
    assert refused(loop) == []
    assert any(each != "none" for each in agent.actions)
    given = {step_of(message): message["content"] for message in agent.history if message["role"] == "assistant"}
    bodies = sent(loop)
    assert len(bodies) == STEPS + 1
    for body in bodies:
        assert body["thinking"] == thinking
        for message in (each for each in body["messages"] if each["role"] == "assistant"):
            kept = [block for block in message["content"] if block["type"] == "thinking"]
            assert kept
            assert kept == [block for block in given[step_of(message)] if block["type"] == "thinking"]


@pytest.mark.requirement("P3", "P4")
async def test_reasoning_that_is_bound_to_nothing_stays_as_the_model_gave_it() -> None:
    loop = await played(OnResponses)
    given = {item["id"]: item for item in loop.agent.history if item.get("type") == "reasoning"}
    bodies = sent(loop)
    assert OnResponses.said(loop.answer)
    assert refused(loop) == []
    assert any(each != "none" for each in loop.agent.actions)
    assert len(bodies) == STEPS + 1
    for body in bodies:
        kept = [item for item in body["input"] if item.get("type") == "reasoning"]
        assert kept == [given[item["id"]] for item in kept]
        assert bool(kept) is (body is not bodies[0])


def step_of(message: Mapping[str, Any]) -> str:
    """The first call of an assistant's message."""
    return next((str(block["id"]) for block in message["content"] if block["type"] == "tool_use"), "")


def thoughts(body: Mapping[str, Any]) -> list[Any]:
    blocks = [block for m in body["messages"] if m["role"] == "assistant" for block in m["content"]]
    return [block for block in blocks if block["type"] == "thinking"]


@BOTH
@pytest.mark.requirement("P9", "P2")
async def test_a_restart_goes_on_from_what_was_decided(kind: type[Agent], tmp_path: Path) -> None:
    async with upstream(kind, steps=22) as simulator:
        agent = kind("")
        for most in (18, 4, 1):
            async with weir(simulator.base_url, tmp_path / "w.db", window=WINDOW) as running:
                agent.base_url = running.root
                agent.connect()
                answer = await agent.run(most)
        assert kind.said(answer)
        assert refused(simulator) == []
        arrays = [body.get("input") or body["messages"] for body in sent(simulator)]
        assert len(arrays) == 23
        assert len(agent.actions) == 23
        assert any(each != "none" for each in agent.actions[:18])
        assert all(arrays[at][: len(arrays[at - 1])] == arrays[at - 1] for at in (18, 22))


@each_once
@BOTH
@pytest.mark.requirement("P9", "P8", "R.35")
@pytest.mark.parametrize("trouble", ["restart", "429", "500", "cut_stream:0", "cut_stream:4"])
async def test_what_a_model_has_summed_up_is_not_read_anew(kind: type[Agent], trouble: str, tmp_path: Path) -> None:
    """Over restarts, and over answers that fail and are asked for again, those with a batch among them."""
    policy = {"summaries": {"wait": 20}, "cascade": [{"layer": "compact"}]}
    options: dict[str, Any] = {"summarizer": "summariser", "balanced": policy, "window": WINDOW}
    async with upstream(kind, steps=20, summary_model="summariser") as simulator:
        agent = kind("", streams=True, words=lambda _: 420)
        for most in (11, 3, 7) if trouble == "restart" else (21,):
            async with weir(simulator.base_url, tmp_path / "w.db", **options) as running:
                agent.base_url = running.root
                agent.connect()
                for _ in range(most):
                    if trouble != "restart" and len(agent.answers) > 5:
                        agent.options = {"extra_headers": {"x-sim-fault": trouble}}
                        with pytest.raises(Exception):  # noqa: B017, PT011 - each SDK has its own for each of them
                            await agent.ask()
                        agent.options = {}
                    agent.take(await agent.ask())
        assert agent.number == 21
        asked = [json.dumps(seen.json()) for seen in simulator.ledger if seen.model == "summariser"]
        assert len(asked) > 1
        assert all("> notes so far" in later for later in asked[1:])


@each_once
@BOTH
@SHARED
@pytest.mark.requirement("P9", "P2")
async def test_whichever_process_is_asked_sends_what_was_decided(kind: type[Agent], deployment: Deployment) -> None:
    async with upstream(kind) as simulator, deployment.serving(simulator.base_url, window=WINDOW) as weirs:
        agent, answer = kind(""), None
        for at in range(STEPS + 1):
            agent.base_url = weirs.weirs[at % len(weirs.weirs)].root
            agent.connect()
            answer = await agent.run(1)
        assert kind.said(answer)
        assert refused(simulator) == []
        arrays = [body.get("input") or body["messages"] for body in sent(simulator)]
        assert len(arrays) == STEPS + 1
        changes = [at for at in range(1, len(arrays)) if arrays[at][: len(arrays[at - 1])] != arrays[at - 1]]
        assert 0 < len(changes) <= len(arrays) // 6


OVERFLOWS: Mapping[str, Mapping[str, Any]] = {
    "as 400": {},
    "as an error in the stream": {"overflow_in_stream": "error"},
    "as a failed answer in the stream": {"overflow_in_stream": "failed"},
    "as a stop reason": {"stops_at_window": True},
}


@each_once
@BOTH
@pytest.mark.requirement("A0.3", "P16", "P5")
@pytest.mark.parametrize("how", OVERFLOWS.values(), ids=OVERFLOWS)
async def test_a_window_that_is_smaller_than_said_is_learned(kind: type[Agent], how: Mapping[str, Any]) -> None:
    async with between(kind, simulated={"window": WINDOW // 2, "steps": 12, **how}) as (simulator, running):
        agent = kind(
            running.root,
            streams=True,
            options={"max_output_tokens": 256} if kind is OnResponses else {"max_tokens": 256},
        )
        answer = await agent.run(13)
        assert agent.number == 13
        assert kind.said(answer)
        assert any("retried" in each or "retry" in each for each in agent.actions) or len(simulator.ledger) > 13
        learned = running.runtime.limits_resolver.learned()
        assert [row.limit < WINDOW for row in learned if row.kind == "tokens"] == [True]


@BOTH
@pytest.mark.requirement("P12", "A0.3")
async def test_a_result_that_is_larger_than_the_window_loses_its_middle(kind: type[Agent]) -> None:
    async with between(kind, simulated={"steps": 3}) as (simulator, running):
        agent = kind(running.root, words=lambda step: 9_000 if step == 3 else 40)
        answer = await agent.run()
        assert kind.said(answer)
        assert refused(simulator) == []
        forwarded = json.dumps(sent(simulator)[2].get("input") or sent(simulator)[2]["messages"])
        given = prose(9_000, seed=7_003)
        assert given[:60] in forwarded
        assert given[-60:] in forwarded
        assert given not in forwarded
        assert len(re.findall(r"\b[0-9a-f]{12}\b", forwarded)) == 1


class Refusing(SummaryWriter):
    """A model that summarises nothing."""

    def answer(self, request: Any, **_: Any) -> SimulatedAnswer:
        del request
        return SimulatedAnswer(text="I'm sorry, but I can't help with that.")


@each_once
@BOTH
@pytest.mark.requirement("P6", "P13")
@pytest.mark.parametrize("trouble", ["down", "slow", "refuses"])
async def test_a_summariser_that_does_not_answer_costs_nobody_an_answer(kind: type[Agent], trouble: str) -> None:
    writer = Refusing() if trouble == "refuses" else SummaryWriter()
    simulated = {"steps": 14, "summarizer": writer, "summary_seconds": 60.0 if trouble == "slow" else None}
    named = "fault:503" if trouble == "down" else "same"
    async with between(kind, simulated=simulated, summarizer=named, balanced={"summaries": {"wait": 0.3}}) as (
        simulator,
        running,
    ):
        agent = kind(running.root, words=lambda _: 420)
        answer = await asyncio.wait_for(agent.run(), 60)
        assert kind.said(answer)
        assert agent.number == 15
        assert "can't help" not in "".join(json.dumps(body) for body in sent(simulator))


# -- what a client is told -------------------------------------------------------------------------------------------


def status_error(kind: type[Agent]) -> Any:
    return openai.APIStatusError if kind is OnResponses else anthropic.APIStatusError


@BOTH
@pytest.mark.requirement("P12", "P16")
async def test_what_cannot_fit_is_said_in_the_words_that_clients_know(kind: type[Agent]) -> None:
    async with between(kind) as (simulator, running):
        agent = kind(running.root)
        agent.history = [{"role": "user", "content": TASK}]
        agent.options = {"instructions" if kind is OnResponses else "system": "rule " * 12_000}
        with pytest.raises(status_error(kind)) as caught:
            await agent.ask()
        assert simulator.ledger == []
        body = caught.value.response.json()
        assert caught.value.status_code == 400
        if kind is OnResponses:
            assert caught.value.code == "context_length_exceeded"
            assert body["error"]["param"] == "input"
        else:
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert re.match(r"prompt is too long: \d+ tokens > \d+ maximum", body["error"]["message"])


@pytest.mark.requirement("A4.6", "P16")
async def test_a_bucket_that_refuses_says_by_how_much_it_is_too_long_in_the_words_of_messages() -> None:
    rejecting = {"enforce": "bucket", "buckets": {"system": {"cap": 300, "on_overflow": "reject"}}}
    async with between(OnMessages, balanced=rejecting) as (simulator, running):
        agent = OnMessages(running.root)
        agent.options = {"system": "rule " * 400}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await agent.ask()
    assert simulator.ledger == []
    error = caught.value.response.json()["error"]
    assert 300 < error["weir"]["used"] < WINDOW
    assert error["message"].startswith(f"prompt is too long: {error['weir']['used']} tokens > 300 maximum. ")


REFUSALS: Mapping[str, tuple[int, str]] = {
    "a wrong key": (401, "authentication_error"),
    "a model that the key may not use": (403, "permission_error"),
    "a body that is too large": (413, "request_too_large"),
    "no JSON": (400, "invalid_request_error"),
    "a body that is packed": (415, "invalid_request_error"),
    "a body that is not what it says": (400, "invalid_request_error"),
}


@BOTH
@pytest.mark.requirement("P7", "P16")
async def test_refusals_have_the_shape_of_the_endpoint(kind: type[Agent], tmp_path: Path) -> None:
    yaml = (
        "upstreams: {{main: {{base_url: '{url}', api_key: sk-up}}}}\n"
        "window: 8192\nauth: {{mode: keys}}\nlimits: {{body: 20000}}\n"
        "keys: [{{secret: right-key, name: me, models: [sim]}}]\n"
    )
    async with (
        upstream(kind) as simulator,
        weir("", folder=tmp_path, yaml=yaml.format(url=simulator.base_url)) as running,
    ):
        async with httpx.AsyncClient(base_url=running.root) as client:
            array = {"input": "x"} if kind is OnResponses else {"messages": [{"role": "user", "content": "x"}]}
            good = {"model": "sim", "max_tokens": 64, **array} if kind is OnMessages else {"model": "sim", **array}
            asked = {
                "a wrong key": ("wrong", json.dumps(good)),
                "a model that the key may not use": ("right-key", json.dumps({**good, "model": "other"})),
                "a body that is too large": ("right-key", json.dumps({**good, "metadata": {"x": "y" * 30_000}})),
                "no JSON": ("right-key", "{"),
                "a body that is packed": ("right-key", json.dumps(good)),
                "a body that is not what it says": ("right-key", json.dumps(good)),
                "": ("right-key", json.dumps(good)),
            }
            for name, (key, content) in asked.items():
                headers = {"authorization": f"Bearer {key}"} if kind is OnResponses else {"x-api-key": key}
                headers |= {"content-encoding": "lzma"} if "packed" in name else {}
                headers |= {"content-encoding": "gzip"} if "not what" in name else {}
                answer = await client.post(kind.path, content=content, headers=headers)
                if not name:
                    assert answer.status_code == 200, answer.text
                    continue
                status, word = REFUSALS[name]
                error = answer.json()["error"]
                assert answer.status_code == status, name
                assert error["message"]
                if kind is OnMessages:
                    assert answer.json()["type"] == "error"
                    assert error["type"] == word, name
                else:
                    assert error["code"], name
            if kind is OnMessages:  # a key that may use some models only, where none is named
                answer = await client.get("/v1/messages/batches", headers={"x-api-key": "right-key"})
                assert (answer.status_code, answer.json()["type"]) == (403, "error")
                assert answer.json()["error"]["type"] == "permission_error"
        assert len(simulator.ledger) == 1


@each_once
@BOTH
@pytest.mark.requirement("P5", "P8", "R.35")
@pytest.mark.parametrize("fault", ["429@1", "500@1", "cut_stream:0@1", "cut_stream:4@1"])
async def test_what_goes_wrong_at_the_provider_is_tried_again_by_the_client_and_decided_once(
    kind: type[Agent], fault: str
) -> None:
    async with between(kind, simulated={"steps": 14}) as (simulator, running):
        agent = kind(running.root, streams=True, words=lambda _: 420)
        while True:
            agent.options = {}
            if len(agent.answers) == 9:
                agent.options = {"extra_headers": {"x-sim-fault": fault}}
                with pytest.raises(Exception):  # noqa: B017, PT011 - each SDK has its own for each of them
                    await agent.ask()
            if not agent.take(await agent.ask()):
                break
        assert agent.number == 15
        failed, again = (seen.json().get("input") or seen.json()["messages"] for seen in simulator.ledger[9:11])
        assert failed == again
