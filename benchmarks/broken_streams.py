"""What real clients do when a stream breaks: each ending before each client, and whether the client goes on by itself.

``python -m benchmarks.broken_streams --clients DIR`` runs what is installed in DIR (docs/clients.md says how; nothing
is downloaded here) against a server that says half an answer, ends it in one of several ways, and answers whole after
that. ``--unsaid`` breaks before the first word.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proxy.errors import UpstreamUnreachable

HALF = ("I will look ", "at the file ", "and th")
FINAL = "All done, the answer is 7781."
MARK = "7781"
PATIENCE = 90.0
TODAY = "Upstream 'default' broke off its answer."


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends: bytes behind its last event, and whether it is ended, cut or reset."""

    rest: bytes = b""
    how: str = "cut"


def told(message: str, kind: str, code: object, **more: object) -> bytes:
    """An error as an event of a stream."""
    error = {"message": message, "type": kind, "param": None, "code": code, **more}
    return b"\n\ndata: " + json.dumps({"error": error}).encode() + b"\n\n"


def chunk(text: str | None = None, *, finish: str | None = None, **more: object) -> bytes:
    """A chunk of a completion as an event."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "sim", "choices": [choice]}
    return b"data: " + json.dumps({**value, **more}).encode() + b"\n\n"


ENDINGS: Mapping[str, Ending] = {
    "Weir's": Ending(UpstreamUnreachable(TODAY).event()),
    "other words": Ending(told(TODAY, "api_connection_error", "upstream_unreachable")),
    "cut": Ending(),
    "reset": Ending(how="reset"),
    "ended": Ending(how="end"),
    "finish error": Ending(chunk(finish="error"), "end"),
    "whole": Ending(chunk(finish="stop") + b"data: [DONE]\n\n", "end"),
}


@dataclass(slots=True)
class Server:
    """Answers ``/RUN/v1/chat/completions``; the first main request of a run gets half an answer."""

    port: int = 0
    halves: Sequence[str] = HALF
    endings: dict[str, Ending] = field(default_factory=dict)
    tools: dict[str, bool] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        fields = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest)}
        if "chunked" in fields.get("transfer-encoding", ""):
            body = await chunked(reader)
        else:
            body = await reader.readexactly(int(fields.get("content-length", "0")))
        method, path, _ = line.split(" ")
        run = path.split("/")[1]
        if method != "POST" or not path.split("?")[0].endswith("/chat/completions"):
            data = json.dumps({"object": "list", "data": [{"id": "sim", "object": "model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data))
            writer.write(data)
            return True
        asked = json.loads(body)
        main = bool(asked.get("tools")) or not self.tools.get(run, False)
        self.asked[run] = self.asked.get(run, 0) + main
        self.agents[run] = fields.get("user-agent", "")
        if not asked.get("stream"):
            message = {"role": "assistant", "content": FINAL}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 100, "completion_tokens": 9, "total_tokens": 109}
            value = {"id": "c", "object": "chat.completion", "created": 1, "model": "sim", "choices": [choice]}
            data = json.dumps({**value, "usage": usage}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data))
            writer.write(data)
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if not main or self.asked[run] > 1:
            usage = chunk(None).replace(
                b'"choices": [{"index": 0, "delta": {}, "finish_reason": null}]',
                b'"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 9, "total_tokens": 109}',
            )
            for data in (chunk(FINAL), chunk(finish="stop"), usage, b"data: [DONE]\n\n"):
                send(writer, data)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        for text in self.halves:
            send(writer, chunk(text) if text else chunk("").replace(b'{"content"', b'{"role": "assistant", "content"'))
            await writer.drain()
            await asyncio.sleep(0.05)
        ending = self.endings[run]
        if ending.rest:
            send(writer, ending.rest)
        await writer.drain()
        if ending.how == "end":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        await asyncio.sleep(0.05)
        if ending.how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one chunk of a chunked body."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def chunked(reader: asyncio.StreamReader) -> bytes:
    """The body of a chunked request."""
    parts: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


ASK = "Say what the answer is."
PY_OPENAI = """
import sys, openai
ASKED = [{"role": "user", "content": "hi"}]
c = openai.OpenAI(base_url=sys.argv[1], api_key="k")
try:
    stream = c.chat.completions.create(model="sim", stream=True, messages=ASKED)
    print("".join(x.choices[0].delta.content or "" for x in stream if x.choices))
except Exception as e:
    print("RAISED", type(e).__mro__[:3], e); sys.exit(1)
"""
PY_HELPER = """
import sys, openai
ASKED = [{"role": "user", "content": "hi"}]
c = openai.OpenAI(base_url=sys.argv[1], api_key="k")
try:
    with c.chat.completions.stream(model="sim", messages=ASKED) as s:
        print(s.get_final_completion().choices[0].message.content)
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
try:
    print("".join(str(x.content) for x in ChatOpenAI(base_url=sys.argv[1], api_key="k", model="sim").stream("hi")))
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_LANGCHAIN_RETRY = """
import sys
from langchain_openai import ChatOpenAI
try:
    print(ChatOpenAI(base_url=sys.argv[1], api_key="k", model="sim", streaming=True).with_retry().invoke("hi").content)
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_LITELLM = """
import sys, litellm
ASKED = [{"role": "user", "content": "hi"}]
try:
    base = sys.argv[1]
    stream = litellm.completion("openai/sim", api_base=base, api_key="k", stream=True, num_retries=2, messages=ASKED)
    print("".join(x.choices[0].delta.content or "" for x in stream))
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_PYDANTIC = """
import sys, asyncio
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
async def main():
    agent = Agent(OpenAIChatModel("sim", provider=OpenAIProvider(base_url=sys.argv[1], api_key="k")))
    async with agent.run_stream("hi") as r:
        print(await r.get_output())
try:
    asyncio.run(main())
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_AGENTS = """
import sys, asyncio
from agents import Agent, Runner, OpenAIChatCompletionsModel, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
async def main():
    m = OpenAIChatCompletionsModel(model="sim", openai_client=AsyncOpenAI(base_url=sys.argv[1], api_key="k"))
    r = Runner.run_streamed(Agent(name="a", model=m), "hi")
    async for _ in r.stream_events(): pass
    print(r.final_output)
try:
    asyncio.run(main())
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
PY_SMOL = """
import sys
from smolagents import ToolCallingAgent, OpenAIServerModel
model = OpenAIServerModel("sim", api_base=sys.argv[1], api_key="k")
agent = ToolCallingAgent(tools=[], model=model, stream_outputs=True, max_steps=3)
try:
    print("RESULT", agent.run("hi"))
except Exception as e:
    print("RAISED", type(e), e); sys.exit(1)
"""
JS_OPENAI = """
import OpenAI from 'openai';
const c = new OpenAI({baseURL: process.argv[2], apiKey: 'k'});
try {
  let t = '';
  const messages = [{role: 'user', content: 'hi'}];
  const stream = await c.chat.completions.create({model: 'sim', stream: true, messages});
  for await (const x of stream) t += x.choices[0]?.delta?.content ?? '';
  console.log(t);
} catch (e) { console.log('RAISED', e.constructor.name, e.message, e.code); process.exit(1); }
"""
JS_AI = """
import { streamText } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
const p = createOpenAICompatible({name: 'weir', baseURL: process.argv[2], apiKey: 'k'});
let failed = null;
const r = streamText({model: p('sim'), prompt: 'hi', onError: ({error}) => { failed = error; }});
let t = '';
try {
  for await (const x of r.textStream) t += x;
  console.log(t, 'FINISH', await r.finishReason);
} catch (e) { failed = failed ?? e; }
if (failed) {
  console.log('RAISED', failed?.constructor?.name, failed?.message, 'retryable', failed?.isRetryable);
  process.exit(1);
}
"""
JS_AI_OPENAI = (
    JS_AI.replace(
        "import { createOpenAICompatible } from '@ai-sdk/openai-compatible';",
        "import { createOpenAI } from '@ai-sdk/openai';",
    )
    .replace("createOpenAICompatible({name: 'weir', ", "createOpenAI({")
    .replace("model: p('sim')", "model: p.chat('sim')")
)


@dataclass(frozen=True, slots=True)
class Client:
    """One program: the command, and files that it wants in its home and in its folder."""

    command: Callable[[Path, str], Sequence[str]]
    files: Callable[[str], Mapping[str, str]] = lambda _: {}
    env: Callable[[str], Mapping[str, str]] = lambda _: {}
    before: Callable[[Path, str], Sequence[str]] | None = None
    tools: bool = False


def python(folder: str, script: str) -> Client:
    """A script for the environment in ``folder``."""
    return Client(lambda root, base: (str(root / folder / "bin/python"), "-c", script, base))


def node(script: str) -> Client:
    """A script for the packages in ``node-sdk``."""

    def command(root: Path, base: str) -> Sequence[str]:
        place = root / "node-sdk" / f"run{abs(hash(script))}.mjs"
        place.write_text(script)
        return ("node", str(place), base)

    return Client(command)


def bin_of(root: Path, package: str, name: str) -> tuple[str, ...]:
    """The command of a program of npm's."""
    return ("node", str(root / package / "node_modules/.bin" / name))


def pi_models(base: str) -> str:
    """A configuration with one model."""
    return json.dumps(
        {
            "providers": {
                "weir": {
                    "baseUrl": base,
                    "api": "openai-completions",
                    "apiKey": "k",
                    "models": [
                        {
                            "id": "sim",
                            "name": "sim",
                            "reasoning": False,
                            "input": ["text"],
                            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                            "contextWindow": 128000,
                            "maxTokens": 4096,
                        }
                    ],
                }
            }
        }
    )


def opencode(base: str) -> str:
    """A configuration with one model."""
    return json.dumps(
        {
            "autoupdate": False,
            "share": "disabled",
            "provider": {
                "weir": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "weir",
                    "options": {"baseURL": base, "apiKey": "k"},
                    "models": {"sim": {"name": "sim", "limit": {"context": 128000, "output": 4096}}},
                }
            },
        }
    )


def continue_(base: str) -> str:
    """A configuration with one model."""
    model = {"name": "sim", "provider": "openai", "model": "sim", "apiBase": base, "apiKey": "k", "roles": ["chat"]}
    return json.dumps({"name": "t", "version": "0.0.1", "schema": "v1", "models": [model]})


CLIENTS: Mapping[str, Client] = {
    "openai-py": python("py", PY_OPENAI),
    "openai-py .stream()": python("py", PY_HELPER),
    "openai-node": node(JS_OPENAI),
    "ai-sdk compatible": node(JS_AI),
    "ai-sdk openai.chat": node(JS_AI_OPENAI),
    "langchain stream": python("py", PY_LANGCHAIN),
    "langchain with_retry": python("py", PY_LANGCHAIN_RETRY),
    "litellm": python("py-litellm", PY_LITELLM),
    "pydantic-ai": python("py", PY_PYDANTIC),
    "openai-agents": python("py", PY_AGENTS),
    "smolagents": python("py", PY_SMOL),
    "pi": Client(
        lambda root, _: (
            *bin_of(root, "mariozechner-pi-coding-agent", "pi"),
            "-p",
            "--offline",
            "--no-session",
            "--provider",
            "weir",
            "--model",
            "sim",
            ASK,
        ),
        lambda base: {".pi/agent/models.json": pi_models(base)},
        tools=True,
    ),
    "opencode": Client(
        lambda root, _: (
            str(root / "opencode-ai/node_modules/opencode-linux-x64/bin/opencode"),
            "run",
            "-m",
            "weir/sim",
            ASK,
        ),
        lambda base: {"work/opencode.json": opencode(base)},
        lambda _: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        tools=True,
    ),
    "qwen-code": Client(
        lambda root, base: (
            *bin_of(root, "qwen-code-qwen-code", "qwen"),
            "-y",
            "--auth-type",
            "openai",
            "--openai-api-key",
            "k",
            "--openai-base-url",
            base,
            "-m",
            "sim",
            "-p",
            ASK,
        ),
        tools=True,
    ),
    "cline": Client(
        lambda root, _: (
            str(root / "cline/node_modules/@cline/cli-linux-x64/bin/cline"),
            "-P",
            "openai-compatible",
            "-m",
            "sim",
            ASK,
        ),
        before=lambda root, base: (
            str(root / "cline/node_modules/@cline/cli-linux-x64/bin/cline"),
            "auth",
            "-p",
            "openai-compatible",
            "-k",
            "k",
            "-m",
            "sim",
            "-b",
            base,
        ),
        tools=True,
    ),
    "continue": Client(
        lambda root, _: (*bin_of(root, "continuedev-cli", "cn"), "--config", "config.yaml", "-p", ASK),
        lambda base: {"work/config.yaml": continue_(base)},
        lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"},
        tools=True,
    ),
    "aider": Client(
        lambda root, base: (
            str(root / "py-aider/bin/aider"),
            "--model",
            "openai/sim",
            "--openai-api-base",
            base,
            "--openai-api-key",
            "k",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--no-analytics",
            "--no-show-model-warnings",
            "--edit-format",
            "ask",
            "--map-tokens",
            "0",
            "--no-pretty",
            "--message",
            ASK,
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run."""

    requests: int
    code: int | None
    output: str

    @property
    def verdict(self) -> str:
        """Whether the client went on, told its user of an error, or took half an answer for a whole one."""
        if self.requests > 1 and MARK in self.output:
            return f"goes on ({self.requests})"
        if self.requests == 0:
            return "never asked"
        if self.code is None:
            return f"hangs ({self.requests})"
        return f"error ({self.requests})" if self.code or "RAISED" in self.output else f"exit 0 ({self.requests})"


async def run(server: Server, root: Path, name: str, ending: str) -> Result:
    """One client in front of one ending."""
    client, key = CLIENTS[name], f"r{len(server.endings)}"
    server.endings[key], server.tools[key] = ENDINGS[ending], client.tools
    base = f"http://127.0.0.1:{server.port}/{key}/v1"
    with tempfile.TemporaryDirectory(prefix="weir-client-", ignore_cleanup_errors=True) as home:
        folder = Path(home) / "work"
        folder.mkdir()
        for place, text in client.files(base).items():
            (Path(home) / place).parent.mkdir(parents=True, exist_ok=True)
            (Path(home) / place).write_text(text)
        clean = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LD_LIBRARY_PATH")}
        env = {
            **clean,
            "HOME": home,
            "XDG_CONFIG_HOME": f"{home}/.config",
            "XDG_DATA_HOME": f"{home}/.local/share",
            "CI": "1",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "DO_NOT_TRACK": "1",
            **client.env(base),
        }
        if client.before is not None:
            await execute(client.before(root, base), folder, env)
        code, output = await execute(client.command(root, base), folder, env)
    return Result(server.asked.get(key, 0), code, output)


async def execute(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code (None where it did not come to its end) and what was printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    said = bytearray()

    async def read() -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65536):
            said.extend(data)

    try:
        await asyncio.wait_for(asyncio.gather(read(), process.wait()), PATIENCE)
        code = process.returncode
    except TimeoutError:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return code, said.decode(errors="replace")


async def main() -> None:
    """Run what is asked for, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--endings", default="")
    parser.add_argument("--unsaid", action="store_true")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    server = Server(halves=("",) if given.unsaid else HALF)
    listening = await asyncio.start_server(server, "127.0.0.1", 0, limit=1 << 24)
    server.port = listening.sockets[0].getsockname()[1]
    for name in given.only.split(",") if given.only else CLIENTS:
        for ending in given.endings.split(";") if given.endings else ENDINGS:
            result = await run(server, given.clients.resolve(), name, ending)
            print(
                f"{name:22} {ending:26} {result.verdict:16}",
                result.output[-300:].replace("\n", " | ") if not given.show else "",
                flush=True,
            )
            if given.show:
                print(result.code, result.output[-3000:])
    listening.close()


if __name__ == "__main__":
    asyncio.run(main())
