"""The trace of a request reads as what happened to it: golden trees, received by OTLP from a whole Weir."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from proxy.telemetry import names
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    NOTHING_RECALLED,
    TOOLS,
    RunningWeir,
    Talk,
    WeirProcess,
    free_port,
    opening,
    prose,
    tool_step,
    weir,
)
from tests.functional.test_store_failures import moved_away
from tests.misbehaving import Failing, SummaryMode
from tests.profile import soak
from tests.receiver import Receiver, attributes, receiving, tree
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {
    "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
    "tracestate": "vendor=a:1,other=b",
    "baggage": "user.id=canary,session.id=canary",
    "uberctx-user": "canary",
}
NAMED = {"x-weir-conversation": "chat-7"}
SHOWN = (
    *(
        names.HTTP_STATUS,
        names.ERROR_TYPE,
        names.ACTION,
        names.BEFORE,
        names.AFTER,
        names.UNITS,
        names.REF,
        names.HTTP_RESENDS,
    ),
    *(names.CONVERSATION_COMPACTED, names.SUMMARIZER, names.FINISH_REASONS, names.FIRST_CHUNK),
    *(names.USAGE_INPUT, names.USAGE_OUTPUT),
)
HIDDEN = (names.REF, names.FIRST_CHUNK)


QUIET = EVICTING | NOTHING_RECALLED
PATIENT = QUIET | {"summaries": {"wait": 20}}


@dataclass(slots=True)
class Scene:
    """A whole Weir that exports to a receiver."""

    receiver: Receiver
    simulator: RunningSimulator
    weir: RunningWeir
    telemetry: Telemetry

    async def spans(self) -> list[Span]:
        """What has arrived when all work is done."""
        await asyncio.sleep(0)
        await self.weir.runtime.preparation.settled()
        await asyncio.to_thread(self.telemetry.flush)
        return self.receiver.spans()

    async def tree(self, *shown: str, events: bool = True, about: int = 1) -> str:
        """The spans as text."""
        return tree(await self.spans(), *(shown or SHOWN), events=events, hidden=HIDDEN, about=about)


@asynccontextmanager
async def scene(
    *,
    window: int = 8192,
    believed: int = 8192,
    balanced: Mapping[str, Any] = QUIET,
    summarizer: str | None = None,
    protocol: str = "http/protobuf",
    capture: bool = False,
    baggage: bool = False,
    simulated: SimulatorSettings | None = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    settings = simulated or SimulatorSettings(window=window, summary_model="notes")
    with receiving() as receiver:
        telemetry = Telemetry.create(
            OtelSettings(
                otlp_endpoint=receiver.grpc if protocol == "grpc" else receiver.http,
                otlp_protocol=protocol,  # type: ignore[arg-type]
                capture_content=capture,
                read_baggage=baggage,
            )
        )
        async with (
            serve_simulator(settings, counter=COUNTER) as simulator,
            weir(
                simulator.base_url,
                window=believed,
                balanced=balanced,
                summarizer=summarizer,
                telemetry=telemetry,
                **options,
            ) as target,
        ):
            yield Scene(receiver, simulator, target, telemetry)


def agent(steps: int) -> list[Any]:
    """A conversation of tool steps."""
    return [*opening(), *(message for number in range(steps) for message in tool_step(number))]


def chat(turns: int) -> list[Any]:
    """A conversation of questions and answers, with a last question."""
    messages = opening()[:1]
    for number in range(turns):
        messages += [
            {"role": "user", "content": prose(132, seed=2 * number)},
            {"role": "assistant", "content": prose(132, seed=2 * number + 1)},
        ]
    return [*messages, {"role": "user", "content": "and now?"}]


async def ask(scene: Scene, messages: list[Any], *, headers: dict[str, str] = CONTEXT | NAMED, **options: Any) -> Any:
    client = scene.weir.client("sk-test-canary", default_headers=headers)
    given = {"model": "sim", "max_tokens": 512, "tools": TOOLS, **options}
    return await client.chat.completions.create(messages=messages, **given)


async def gone(started: Scene, messages: list[Any], **options: Any) -> None:
    """Ask for a stream, read a piece of it and hang up."""
    stream = await ask(started, messages, stream=True, **options)
    async for _ in stream:
        break
    await stream.close()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if started.receiver.spans() or (await started.spans()):
            return


PASS = """\
SERVER weir pass sim status=200 action=pass before=250 after=250
  INTERNAL weir context.plan action=pass before=250 after=250
  CLIENT chat sim status=200 finish_reasons=stop input=237 output_tokens=26"""


@pytest.mark.requirement("P15", "A0.139")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_request_that_passes_has_a_plan_and_one_attempt(protocol: str) -> None:
    async with scene(protocol=protocol) as started:
        await ask(started, opening())
        assert await started.tree() == PASS
        assert len(started.receiver.encodings) == (0 if protocol == "grpc" else 1)


EVICT = """\
SERVER weir edit sim status=200 action=edit before=8825 after=3238
  * weir.context.status actions=evict=14 percent=121.4 tokens=3238 limit=7271 used=8825
  * weir.eviction count=14 placeholders=14 policy=balanced freed=5587 remaining=3238
  INTERNAL weir context.plan action=edit before=8825 after=3238
    INTERNAL weir context.layer ingest_cap before=8825 after=8825 units=0
    INTERNAL weir context.layer dedupe before=8825 after=8825 units=0
    INTERNAL weir context.layer evict before=8825 after=3238 units=14
  CLIENT chat sim status=200 finish_reasons=stop input=3225 output_tokens=27
  INTERNAL weir context.prepare"""


@pytest.mark.requirement("P15", "A0.6", "A0.18")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_batch_of_edits_has_a_child_per_layer_and_says_what_it_freed(protocol: str) -> None:
    async with scene(protocol=protocol) as started:
        await ask(started, agent(18))
        assert await started.tree() == EVICT


OVERFLOW = """\
SERVER weir edit sim status=200 action=edit before=10796 after=3584
  * weir.context.status actions=evict=18,retry=1 percent=148.5 tokens=3584 limit=7271 used=10796
  * weir.eviction count=18 placeholders=18 policy=balanced freed=7221 remaining=3588
  INTERNAL weir context.plan action=pass before=10809 after=10809
  CLIENT chat sim ERROR status=400 error=context_length_exceeded
  INTERNAL weir context.plan action=edit before=10796 after=3584
    INTERNAL weir context.layer ingest_cap before=10796 after=10796 units=0
    INTERNAL weir context.layer dedupe before=10796 after=10796 units=0
    INTERNAL weir context.layer evict before=10796 after=3584 units=18
  CLIENT chat sim status=200 resend_count=1 finish_reasons=stop input=3575 output_tokens=25 after=sim:context_length_exceeded
  INTERNAL weir context.prepare"""


@pytest.mark.requirement("P15", "P16")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_an_overflow_is_a_failed_attempt_a_harder_plan_and_an_attempt_linked_to_the_first(protocol: str) -> None:
    async with scene(protocol=protocol, believed=32768) as started:
        await ask(started, agent(22))
        assert await started.tree() == OVERFLOW


SUMMARISER_DOWN = """\
SERVER weir edit sim status=200 action=edit before=11500 after=3500
  * weir.context.status actions=compact=1 percent=158.5 tokens=3500 limit=7500 used=11500
  * weir.eviction count=0 placeholders=1 policy=balanced freed=8000 remaining=3500
  INTERNAL weir context.plan action=edit before=11500 after=3500
    INTERNAL weir context.layer ingest_cap before=11500 after=11500 units=0
    INTERNAL weir context.layer dedupe before=11500 after=11500 units=0
    INTERNAL weir context.layer evict before=11500 after=11500 units=0
    INTERNAL weir context.layer compact before=11500 after=3500 units=46 ref=…
      CLIENT chat notes ERROR status=500 error=status_500 summarizer=True
      CLIENT chat notes ERROR status=500 error=status_500 summarizer=True
  CLIENT chat sim status=200 compacted=True finish_reasons=stop input=3500 output_tokens=28"""


@pytest.mark.requirement("P15", "P13")
async def test_a_summariser_that_fails_is_an_error_under_its_layer_and_the_request_goes_on() -> None:
    settings = SimulatorSettings(summary_model="notes", summarizer=Failing(SummaryMode.STATUS_500))
    async with scene(summarizer="notes", balanced=PATIENT, simulated=settings) as started:
        await ask(started, chat(26))
        assert await started.tree(about=500) == SUMMARISER_DOWN


STORE_DOWN = """\
SERVER weir pass sim status=200 action=pass before=N after=N
  * weir.degraded reason=store
  INTERNAL weir context.plan action=pass before=N after=N
  CLIENT chat sim status=200 finish_reasons=stop input=N output_tokens=N"""


@pytest.mark.requirement("P15", "P9", "A0.139")
async def test_a_store_that_fails_is_an_event_on_the_request(tmp_path: Path) -> None:
    database = tmp_path / "w.db"
    async with scene(store=database) as started:
        talk = Talk(started.weir.client(default_headers=CONTEXT | NAMED), opening())
        await talk.agent(2)
        await started.weir.stored()
        with moved_away(database):
            for _ in range(8):
                await started.spans()
                started.receiver.traces.clear()
                await talk.agent(1)
                await started.weir.stored()
                if "degraded=store" in talk.actions()[-1]:
                    break
            assert re.sub(r"(before|after|input|tokens)=\d+", r"\1=N", await started.tree()) == STORE_DOWN


GONE = """\
SERVER weir pass sim status=200 error=client_disconnect action=pass before=250 after=250
  INTERNAL weir context.plan action=pass before=250 after=250
  CLIENT chat sim status=200 error=client_disconnect time_to_first_chunk=…"""


@pytest.mark.requirement("P15")
async def test_a_client_that_hangs_up_in_a_stream_is_no_error_and_ends_both_spans() -> None:
    async with scene(simulated=SimulatorSettings(chunk_delay=0.05)) as started:
        await gone(started, opening())
        assert await started.tree() == GONE


STREAM = """\
SERVER weir pass sim status=200 action=pass before=250 after=250
  INTERNAL weir context.plan action=pass before=250 after=250
  CLIENT chat sim status=200 finish_reasons=stop time_to_first_chunk=… input=237 output_tokens=26"""


@pytest.mark.requirement("P15", "A0.139")
@pytest.mark.parametrize("policy", ["balanced", "off"])
async def test_a_streamed_answer_has_the_time_to_its_first_chunk_in_span_and_metric(policy: str) -> None:
    async with scene(simulated=SimulatorSettings(latency=0.2), policy=policy) as started:
        before = time.monotonic()
        async for _ in await ask(started, opening(), stream=True, stream_options={"include_usage": True}):
            pass
        took = time.monotonic() - before
        found = await started.tree(events=False)
        (call,) = [span for span in started.receiver.spans() if span.name == "chat sim"]
        async with aiohttp.ClientSession() as session, session.get(f"{started.weir.root}/metrics") as answer:
            metrics = await answer.text()
    assert found == STREAM if policy == "balanced" else "time_to_first_chunk=…" in found
    seconds = attributes(call.attributes)["gen_ai.response.time_to_first_chunk"]
    assert 0.2 <= seconds <= took
    (counted,) = re.findall(
        r"^gen_ai_client_inference_time_to_first_chunk_seconds_sum\{.*\} (.*)$", metrics, re.MULTILINE
    )
    assert float(counted) == pytest.approx(seconds)


TOO_LONG = [{"role": "system", "content": prose(9_000, seed=1)}, {"role": "user", "content": "Go on."}]


CALLED = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "default",
    "gen_ai.request.model": "sim",
    "gen_ai.request.max_tokens": 512,
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.seed": 7,
    "gen_ai.request.reasoning.level": "low",
    "gen_ai.output.type": "json",
    "server.address": "127.0.0.1",
    "http.response.status_code": 200,
    "gen_ai.response.model": "sim",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.conversation.id": "chat-7",
    "session.id": "chat-7",
}


@pytest.mark.requirement("P15")
async def test_an_attempt_says_what_was_asked_and_answered_and_the_root_who_asked() -> None:
    given = {"temperature": 0.5, "seed": 7, "stop": "END", "response_format": {"type": "json_object"}}
    async with scene() as started:
        await ask(started, opening(), extra_body=given | {"reasoning_effort": "low", "n": 1})
        root, _, call = (attributes(span.attributes) for span in await started.spans())
        port = int(started.simulator.base_url.rsplit(":", 1)[1].split("/")[0])
        own = int(started.weir.root.rsplit(":", 1)[1])
    assert CALLED.items() <= call.items()
    assert "gen_ai.request.stop_sequences" not in call, "the client's own words"
    assert call["server.port"] == port
    assert call["gen_ai.response.id"].startswith("chatcmpl-")
    assert "gen_ai.request.choice.count" not in call
    assert (root["url.scheme"], root["url.path"]) == ("http", "/v1/chat/completions")
    assert (root["server.address"], root["server.port"], root["client.address"]) == ("127.0.0.1", own, "127.0.0.1")
    assert root["http.request.method"] == "POST"
    assert len(root["weir.tenant"]) == 32
    assert {name for found in (root, call) for name in found} <= names.ATTRIBUTES


@pytest.mark.requirement("P15", "S.18")
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("sampled", ["01", "00"])
async def test_trace_context_goes_upstream_by_choice_and_baggage_never(
    tmp_path: Path, forward: bool, sampled: str
) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        upstream = f"{{base_url: '{simulator.base_url}', forward_trace: {str(forward).lower()}}}"
        async with scene(yaml=f"upstreams: {{main: {upstream}}}\n", folder=tmp_path) as started:
            headers = CONTEXT | {"traceparent": CONTEXT["traceparent"][:-2] + sampled}
            await ask(started, opening(), headers=headers)
            await started.weir.client(default_headers=headers).models.list()
            calls = {s.span_id.hex() for s in await started.spans() if s.kind == Span.SPAN_KIND_CLIENT}
        seen = [*simulator.ledger]
    assert len(seen) >= 2
    for each in seen:
        assert each.header("baggage") is None
        assert each.header("uberctx-user") is None
        assert each.header("tracestate") == (CONTEXT["tracestate"] if forward else None)
        parent = each.header("traceparent")
        assert (parent is not None) is forward
        if forward and sampled == "01":
            assert (parent or "").split("-")[2] in calls
        elif forward:
            assert parent == headers["traceparent"]


@pytest.mark.requirement("S.18")
@pytest.mark.parametrize("read", [False, True])
async def test_baggage_is_read_only_where_the_operator_wants_it(read: bool) -> None:
    said = {"baggage": "session.id=visit%201,user.id=anna;ttl=1,secret=canary"}
    async with scene(baggage=read) as started:
        await ask(started, opening(), headers=CONTEXT | NAMED | said)
        spans = [attributes(span.attributes) for span in await started.spans()]
        assert started.simulator.ledger[-1].header("baggage") is None
    assert {span.get("user.id") for span in spans} == ({"anna"} if read else {None})
    assert {span["session.id"] for span in spans} == ({"visit 1"} if read else {"chat-7"})
    assert {span["gen_ai.conversation.id"] for span in spans} == {"chat-7"}
    assert "canary" not in repr(spans)


@pytest.mark.requirement("P15", "S.16")
async def test_message_text_is_in_no_span_unless_the_operator_wants_it() -> None:
    async with scene(summarizer="notes") as started:
        await ask(started, chat(26))
        stream = await ask(started, opening(), stream=True)
        async for _ in stream:
            pass
        received = b"".join(message.SerializeToString() for message in started.receiver.traces)
        for canary in (b"bravo", b"axios", b"careful", b"read_file", b"canary", b"gen_ai.input", b"gen_ai.output"):
            assert canary not in received


@pytest.mark.requirement("P15", "S.16")
@pytest.mark.parametrize("streamed", [False, True])
async def test_with_the_operators_leave_the_messages_are_on_the_calls_as_the_conventions_write_them(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-canary0123456789abcdef"
    messages = [*agent(1), {"role": "user", "content": [{"type": "text", "text": f"My key is {secret}, go on."}]}]
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    async with scene(simulated=SimulatorSettings(answers=("", "It is done."))) as started:
        answer = await ask(started, messages, stream=streamed, stop="END")
        if streamed:
            async for _ in answer:
                pass
        spans = await started.spans()
    (call,) = [attributes(span.attributes) for span in spans if span.name == "chat sim"]
    said = json.loads(call["gen_ai.input.messages"])
    assert call["gen_ai.request.stop_sequences"] == ["END"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "user"]
    assert said[2]["parts"] == [
        {"type": "tool_call", "id": "call_0", "name": "read_file", "arguments": '{"path": "src/module_0.py"}'}
    ]
    assert (said[3]["parts"][0]["type"], said[3]["parts"][0]["id"]) == ("tool_call_response", "call_0")
    assert said[4]["parts"] == [{"type": "text", "content": "My key is [redacted], go on."}]
    (answered,) = json.loads(call["gen_ai.output.messages"])
    assert (answered["role"], answered["finish_reason"]) == ("assistant", "stop")
    assert answered["parts"][0]["type"] == "text"
    assert answered["parts"][0]["content"]
    (tool,) = json.loads(call["gen_ai.tool.definitions"])
    assert (tool["type"], tool["name"], tool["parameters"]["type"]) == ("function", "read_file", "object")
    assert secret not in repr([span.SerializeToString() for span in spans])


@pytest.mark.requirement("P15", "S.16")
async def test_long_messages_stay_valid_json_of_bounded_size_with_both_ends_of_the_conversation() -> None:
    async with scene(capture=True, summarizer="notes", window=32768, believed=32768) as started:
        await ask(started, agent(40))
        calls = [attributes(span.attributes) for span in await started.spans() if span.name.startswith("chat ")]
    for call in calls:
        text = call["gen_ai.input.messages"]
        assert len(text.encode()) <= 16 * 1024
        said = json.loads(text)
        assert said[0]["role"] == "system"
        assert said[-1]["parts"]
    assert calls[-1]["weir.content.dropped"] + len(json.loads(calls[-1]["gen_ai.input.messages"])) == 82


@pytest.mark.requirement("P15", "A0.139", "R.77")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_process_exports_its_traces_and_says_where_it_runs(protocol: str, tmp_path: Path) -> None:
    with receiving() as receiver:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc if protocol == "grpc" else receiver.http,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=staging",
        }
        async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
            file = tmp_path / "weir.yaml"
            file.write_text(json.dumps({"policies": {"balanced": QUIET}}))
            arguments = ["--config", str(file), "--upstream", simulator.base_url, "--window", "8192"]
            arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
            async with WeirProcess(arguments, free_port(), env=env) as target:
                client = target.client(default_headers=CONTEXT | NAMED)
                for steps in (0, 18):
                    await client.chat.completions.create(
                        model="sim", messages=agent(steps), max_tokens=512, tools=TOOLS
                    )
                assert target.process is not None
                await target.stop()
        assert tree(receiver.spans(), *SHOWN, hidden=HIDDEN) == f"{PASS}\n{EVICT}"
        resource = receiver.resource()
        if protocol != "grpc":
            assert set(receiver.encodings) == {"gzip"}
            assert {headers["x-team"] for headers in receiver.headers} == {"blue"}
    assert resource["service.name"] == "weir"
    assert resource["deployment.environment.name"] == "staging"
    assert resource["service.version"]


@pytest.mark.requirement("A0.139", "R.77")
@pytest.mark.parametrize("protocol", ["http/protobuf", pytest.param("grpc", marks=soak)])
async def test_a_process_whose_collector_never_answers_serves_and_stops_at_once(protocol: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        env |= {"OTEL_BSP_SCHEDULE_DELAY": "10"}
        async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
            arguments = ["--upstream", simulator.base_url, "--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
            async with WeirProcess(arguments, free_port(), env=env) as target:
                for _ in range(5):
                    await target.client().chat.completions.create(model="sim", messages=opening(), max_tokens=64)
                assert target.process is not None
                process = target.process
                await asyncio.wait_for(target.stop(), 60)
                assert process.returncode == 0


CAPPED = QUIET | {"enforce": "bucket", "buckets": {"tools": {"cap": 300, "on_overflow": "reject"}}}


@pytest.mark.requirement("P15", "A0.139")
async def test_a_request_that_a_bucket_refuses_names_it_and_its_key() -> None:
    async with scene(balanced=CAPPED) as started:
        named = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": f"read_{n}"}} for n in range(20)]
        with pytest.raises(openai.BadRequestError):
            await ask(started, opening(), tools=named)
        (root,) = (span for span in await started.spans() if span.kind == Span.SPAN_KIND_SERVER)
        said = {each.key: each.value for each in root.attributes}
    assert said["weir.bucket"].string_value == "tools"
    assert said["weir.bucket.cap"].int_value == 300
    assert said["weir.bucket.used"].int_value > 300
    assert said["weir.action"].string_value == "refuse"
