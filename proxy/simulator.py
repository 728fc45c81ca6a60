"""A simulated model, to try Weir without a key and without a network.

It has a window, counts what it is sent, answers whole or streamed on chat completions, Responses
and Messages, and refuses what does not fit in the words of the provider. What it says means
nothing.

A model named ``fault:429``, ``fault:500`` or ``fault:cut`` is a rate limit, a server error or a
stream that breaks off.
"""

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import uvicorn
from anyio.from_thread import start_blocking_portal
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = Mapping[str, Any]

CREATED = 1_735_689_600
"""When the simulated models were made, seconds since the epoch."""
PRIMING = 3
PER_MESSAGE = 4
PER_CALL = 8
PER_FILE = 765
"""Tokens of a request, of a message, of a call and of a part that is not text, in addition to the
texts in them.
"""
LEAST_CACHED = 1_024
PREFIXES_KEPT = 100_000
REQUESTS_KEPT = 1_000
FAULTS = {"fault:429": 429, "fault:500": 500}
CUT = "fault:cut"


class WordCounter(Protocol):
    def count(self, text: str) -> int:
        """The tokens of a text."""


@dataclass(frozen=True, slots=True)
class SimulatorSettings:
    """``window`` is in tokens, ``latency`` in seconds until an answer begins."""

    window: int = 8_192
    models: tuple[str, ...] = ("sim",)
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """A request that was answered: its body, and the tokens of its prompt."""

    body: bytes
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, with its tokens."""

    id: str
    model: str
    text: str
    prompt: int
    cached: int
    completion: int

    @property
    def pieces(self) -> Sequence[str]:
        """The text in the pieces that a stream brings."""
        words = self.text.split(" ")
        return [f" {word}" if number else word for number, word in enumerate(words)]


class Refused(Exception):
    """A request that gets an error: its status and the error as its endpoint has it."""

    def __init__(self, status: int, body: Body) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class Endpoint:
    """One of the three ways to ask the model: what its requests, answers and errors look like."""

    path: str
    prefix: str

    def prompt(self, request: Body) -> Iterator[Any]:
        """The parts of a request that the model reads, in order."""
        raise NotImplementedError

    def whole(self, answer: Answer) -> Body:
        """An answer as one JSON object."""
        raise NotImplementedError

    def events(self, answer: Answer, request: Body) -> Iterator[Body | bytes]:
        """The same as the events of a stream; bytes go as they are."""
        raise NotImplementedError

    def overflow(self, *, prompt: int, completion: int, window: int) -> Refused:
        """The provider's refusal of a request that does not fit its window; all in tokens."""
        raise NotImplementedError

    def error(self, status: int, message: str, code: str | None = None) -> Refused:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return Refused(
            status, {"error": {"message": message, "type": kind, "param": None, "code": code}}
        )


class Chat(Endpoint):
    path = "/v1/chat/completions"
    prefix = "chatcmpl-"

    def prompt(self, request: Body) -> Iterator[Any]:
        yield from (request[name] for name in ("tools", "functions") if request.get(name))
        yield from request["messages"]

    def whole(self, answer: Answer) -> Body:
        message: Body = {
            "role": "assistant",
            "content": answer.text,
            "refusal": None,
            "annotations": [],
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return {
            **self._head(answer, "chat.completion"),
            "choices": [choice],
            "usage": self._usage(answer),
        }

    def events(self, answer: Answer, request: Body) -> Iterator[Body | bytes]:
        head = self._head(answer, "chat.completion.chunk")
        deltas: list[tuple[Body, str | None]] = [({"role": "assistant", "content": ""}, None)]
        deltas += [({"content": piece}, None) for piece in answer.pieces]
        deltas.append(({}, "stop"))
        for delta, finish in deltas:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield {**head, "choices": [choice]}
        if (request.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self._usage(answer)}
        yield b"data: [DONE]\n\n"

    def overflow(self, *, prompt: int, completion: int, window: int) -> Refused:
        said = f"This model's maximum context length is {window} tokens. However, "
        if prompt > window:
            said += (
                f"your messages resulted in {prompt} tokens. Please reduce the length of the"
                " messages."
            )
        else:
            said += (
                f"you requested {prompt + completion} tokens ({prompt} in the messages,"
                f" {completion} in the "
            )
            said += "completion). Please reduce the length of the messages or completion."
        return self.error(400, said, "context_length_exceeded")

    def _head(self, answer: Answer, kind: str) -> Body:
        return {"id": answer.id, "object": kind, "created": CREATED, "model": answer.model}

    def _usage(self, answer: Answer) -> Body:
        return {
            "prompt_tokens": answer.prompt,
            "completion_tokens": answer.completion,
            "total_tokens": answer.prompt + answer.completion,
            "prompt_tokens_details": {"cached_tokens": answer.cached},
        }


class Responses(Endpoint):
    path = "/v1/responses"
    prefix = "resp_"

    def prompt(self, request: Body) -> Iterator[Any]:
        if request.get("previous_response_id"):
            said = f"Previous response with id '{request['previous_response_id']}' not found."
            raise self.error(400, said, "previous_response_not_found")
        yield from (request[name] for name in ("tools", "instructions") if request.get(name))
        given = request.get("input") or []
        yield from ([given] if isinstance(given, str) else given)

    def whole(self, answer: Answer) -> Body:
        return self._response(answer, "completed", [self._item(answer, "completed", answer.text)])

    def events(self, answer: Answer, request: Body) -> Iterator[Body | bytes]:
        item = self._item(answer, "in_progress", None)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": []}
        events: list[tuple[str, Body]] = [
            ("response.created", {"response": self._response(answer, "in_progress", [])}),
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", {**place, "part": empty}),
        ]
        events += [
            ("response.output_text.delta", {**place, "delta": piece}) for piece in answer.pieces
        ]
        done = self._item(answer, "completed", answer.text)
        events += [
            ("response.output_text.done", {**place, "text": answer.text}),
            ("response.content_part.done", {**place, "part": done["content"][0]}),
            ("response.output_item.done", {"output_index": 0, "item": done}),
            ("response.completed", {"response": self.whole(answer)}),
        ]
        for number, (kind, event) in enumerate(events):
            yield {"type": kind, "sequence_number": number, **event}

    def overflow(self, *, prompt: int, completion: int, window: int) -> Refused:
        said = (
            "Your input exceeds the context window of this model. Please adjust your input and try"
            " again."
        )
        return self.error(400, said, "context_length_exceeded")

    def _response(self, answer: Answer, status: str, output: list[Body]) -> Body:
        usage = {
            "input_tokens": answer.prompt,
            "input_tokens_details": {"cached_tokens": answer.cached},
            "output_tokens": answer.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt + answer.completion,
        }
        return {
            "id": answer.id,
            "object": "response",
            "created_at": CREATED,
            "model": answer.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if status == "completed" else None,
        }

    def _item(self, answer: Answer, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
        name = answer.id.replace(self.prefix, "msg_", 1)
        return {
            "type": "message",
            "id": name,
            "role": "assistant",
            "status": status,
            "content": content,
        }


class Messages(Endpoint):
    path = "/v1/messages"
    prefix = "msg_"

    def prompt(self, request: Body) -> Iterator[Any]:
        yield from (request[name] for name in ("tools", "system") if request.get(name))
        yield from request["messages"]

    def whole(self, answer: Answer) -> Body:
        content = [{"type": "text", "text": answer.text}]
        return {**self._message(answer), "content": content, "stop_reason": "end_turn"}

    def events(self, answer: Answer, request: Body) -> Iterator[Body | bytes]:
        yield {"type": "message_start", "message": self._message(answer)}
        yield {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        }
        for piece in answer.pieces:
            yield {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": piece},
            }
        yield {"type": "content_block_stop", "index": 0}
        ended = {"stop_reason": "end_turn", "stop_sequence": None}
        yield {
            "type": "message_delta",
            "delta": ended,
            "usage": {"output_tokens": answer.completion},
        }
        yield {"type": "message_stop"}

    def overflow(self, *, prompt: int, completion: int, window: int) -> Refused:
        if prompt > window:
            return self.error(400, f"prompt is too long: {prompt} tokens > {window} maximum")
        said = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {completion} >"
            f" {window}, "
        )
        return self.error(400, f"{said}decrease input length or `max_tokens` and try again")

    def error(self, status: int, message: str, code: str | None = None) -> Refused:
        kinds = {404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
        return Refused(status, {"type": "error", "error": {"type": kind, "message": message}})

    def _message(self, answer: Answer) -> Body:
        usage = {
            "input_tokens": answer.prompt - answer.cached,
            "cache_read_input_tokens": answer.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": answer.completion,
        }
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def tokens_of(part: Any, count: Callable[[str], int]) -> int:
    """The tokens of one part of a prompt: a text, a message or item, or definitions of tools."""
    if isinstance(part, str):
        return PER_MESSAGE + count(part)
    if not isinstance(part, Mapping) or not ("role" in part or "type" in part):
        return count(json.dumps(part, ensure_ascii=False))
    total = PER_MESSAGE + _content_tokens(part.get("content"), count)
    for call in part.get("tool_calls") or ():
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments") or function.get("input") or ""
        total += count(str(function.get("name", ""))) + count(str(arguments)) + PER_CALL
    for name in ("arguments", "output", "name"):
        if isinstance(part.get(name), str):
            total += count(part[name])
    return total


def _content_tokens(content: Any, count: Callable[[str], int]) -> int:
    if isinstance(content, str):
        return count(content)
    total = 0
    for part in content if isinstance(content, list) else ():
        said = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(said, str):
            total += count(said)
        elif isinstance(part, Mapping) and part.get("type") in ("tool_use", "tool_result"):
            total += PER_CALL + count(
                json.dumps(part.get("input", part.get("content")), ensure_ascii=False)
            )
        else:
            total += PER_FILE
    return total


class Simulator:
    """The simulated model, as an application that serves it in ``app``; ``received`` are its newest
    requests.
    """

    def __init__(self, settings: SimulatorSettings, *, counter: WordCounter) -> None:
        self.settings = settings
        self.received: deque[Received] = deque(maxlen=REQUESTS_KEPT)
        self._counter = counter
        self._prefixes: LRUCache[bytes, None] = LRUCache(PREFIXES_KEPT)
        self._answered = 0
        routes = [
            Route(e.path, self._serves(e), methods=["POST"])
            for e in (Chat(), Responses(), Messages())
        ]
        routes.append(Route("/v1/messages/count_tokens", self._counted, methods=["POST"]))
        routes.append(Route("/v1/models", self._models, methods=["GET"]))
        self.app = Starlette(routes=routes)

    def _serves(self, endpoint: Endpoint) -> Callable[[HTTPRequest], Any]:
        async def answer(request: HTTPRequest) -> Response:
            body = await request.body()
            try:
                fields = _parsed(endpoint, body)
                answer = self._answer(endpoint, fields, body)
            except Refused as refused:
                return JSONResponse(refused.body, refused.status)
            await asyncio.sleep(self.settings.latency)
            if not fields.get("stream"):
                return JSONResponse(endpoint.whole(answer))
            return StreamingResponse(
                _stream(endpoint, answer, fields), media_type="text/event-stream"
            )

        return answer

    def _answer(self, endpoint: Endpoint, fields: Body, body: bytes) -> Answer:
        model = str(fields.get("model") or self.settings.models[0])
        if model in FAULTS:
            said = "Rate limit reached." if FAULTS[model] == 429 else "The server had an error."
            raise endpoint.error(FAULTS[model], said)
        prompt, cached = self._read(endpoint, fields)
        limits = (
            fields.get(name)
            for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")
        )
        most = next((limit for limit in limits if isinstance(limit, int)), 1)
        if prompt + max(most, 1) > self.settings.window:
            raise endpoint.overflow(prompt=prompt, completion=most, window=self.settings.window)
        self.received.append(Received(body, prompt))
        self._answered += 1
        text = f"Understood. This is answer {self._answered}; I go on from there."
        name = f"{endpoint.prefix}{blake2b(b'%d' % self._answered, digest_size=12).hexdigest()}"
        return Answer(name, model, text, prompt, cached, self._counter.count(text))

    def _read(self, endpoint: Endpoint, fields: Body) -> tuple[int, int]:
        """The tokens of a prompt, and those of its longest prefix that an earlier one began
        with.
        """
        total = PRIMING
        cached = 0
        key = endpoint.path.encode()
        is_known = True
        for part in endpoint.prompt(fields):
            tokens = tokens_of(part, self._counter.count)
            key = blake2b(key + json.dumps(part, sort_keys=True).encode(), digest_size=16).digest()
            is_known = is_known and key in self._prefixes
            cached += tokens if is_known else 0
            total += tokens
            self._prefixes[key] = None
        return total, cached if cached >= LEAST_CACHED else 0

    async def _counted(self, request: HTTPRequest) -> Response:
        endpoint = Messages()
        try:
            fields = _parsed(endpoint, await request.body())
        except Refused as refused:
            return JSONResponse(refused.body, refused.status)
        tokens = sum(tokens_of(part, self._counter.count) for part in endpoint.prompt(fields))
        return JSONResponse({"input_tokens": PRIMING + tokens})

    async def _models(self, _: HTTPRequest) -> Response:
        cards = [
            {"id": name, "object": "model", "created": CREATED, "owned_by": "simulator"}
            for name in self.settings.models
        ]
        return JSONResponse({"object": "list", "data": cards})


def _parsed(endpoint: Endpoint, body: bytes) -> Body:
    try:
        fields = json.loads(body)
    except ValueError:
        raise endpoint.error(400, "We could not parse the JSON body of your request.") from None
    array = "input" if isinstance(endpoint, Responses) else "messages"
    if not isinstance(fields, dict) or (
        array == "messages" and not isinstance(fields.get(array), list)
    ):
        raise endpoint.error(
            400, f"Missing required parameter: '{array}'.", "missing_required_parameter"
        )
    return fields


async def _stream(endpoint: Endpoint, answer: Answer, fields: Body) -> AsyncIterator[bytes]:
    is_named = not isinstance(endpoint, Chat)
    for number, event in enumerate(endpoint.events(answer, fields)):
        if fields.get("model") == CUT and number == 2:
            raise ConnectionResetError("the stream breaks off, as its model is called")
        if isinstance(event, bytes):
            yield event
            continue
        name = f"event: {event['type']}\n".encode() if is_named else b""
        yield name + b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class RunningSimulator:
    simulator: Simulator
    host: str
    port: int

    @property
    def base_url(self) -> str:
        """Where it is served, as the SDKs want it: ``http://127.0.0.1:9000/v1``."""
        return f"http://{self.host}:{self.port}/v1"


def _server(simulator: Simulator) -> uvicorn.Server:
    config = uvicorn.Config(
        simulator.app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


@contextlib.asynccontextmanager
async def serve_simulator(
    settings: SimulatorSettings, *, counter: WordCounter
) -> AsyncIterator[RunningSimulator]:
    """A simulator on a free port of loopback, until the block ends."""
    simulator = Simulator(settings, counter=counter)
    bound = socket.create_server(("127.0.0.1", 0))
    server = _server(simulator)
    # not Server.serve(), which takes the signals of the program that this runs in
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[bound])
    ticking = asyncio.create_task(server.main_loop())
    try:
        host, port = bound.getsockname()[:2]
        yield RunningSimulator(simulator, host, port)
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown(sockets=[bound])
        bound.close()


@contextlib.contextmanager
def run_simulator(
    settings: SimulatorSettings, *, counter: WordCounter
) -> Iterator[RunningSimulator]:
    """The same in a thread of its own, for a program that has its own event loop."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve_simulator(settings, counter=counter)) as running,
    ):
        yield running


def serve_until_stopped(
    settings: SimulatorSettings,
    *,
    counter: WordCounter,
    listener: socket.socket,
    ready: Callable[[RunningSimulator], None],
) -> None:
    """Serve on ``listener`` until a signal ends it; ``ready`` is called once it listens."""
    simulator = Simulator(settings, counter=counter)
    host, port = listener.getsockname()[:2]
    ready(RunningSimulator(simulator, host, port))
    _server(simulator).run(sockets=[listener])
