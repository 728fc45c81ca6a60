"""What real clients do when a stream breaks: each ending before each client, and whether the client
goes on by itself.

``python -m benchmarks.broken_streams --clients DIR`` runs what is installed in DIR (docs/broken-streams.md
says how; nothing is downloaded here) against a server that says half an answer, ends it in one of
several ways, and answers whole after that. ``--unsaid`` breaks before the first word, ``--call
half`` in the middle of a tool call's arguments, ``--call whole`` behind them.
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
from typing import Any

from benchmarks.broken_forms import SURFACES, Ending, call_of
from benchmarks.processes import weir

HALF = ("I will look ", "at the file ", "and th")
FINAL = "All done, the answer is 7781."
MARK = "7781"
KEPT = (b"I will look", b"touch ran")
PATIENCE = 90.0
WHOLE = Ending(how="end")


@dataclass(slots=True)
class Run:
    """What one client is given, and what it asked for: its main requests, which are those with
    tools if it has any.
    """

    surface: str
    ending: Ending
    tools: bool = False
    asked: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Server:
    """Answers ``/RUN/v1/…``; the first main request of a run gets half an answer, or half a tool
    call.
    """

    port: int = 0
    halves: Sequence[str] = HALF
    call: str | None = None
    runs: dict[str, Run] = field(default_factory=dict)
    weir: int | None = None

    @property
    def newest(self) -> Run:
        """The run whose requests come by way of Weir, which does not name it."""
        return self.runs[next(reversed(self.runs))]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        fields = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest)}
        if "chunked" in fields.get("transfer-encoding", ""):
            body = await chunked(reader)
        else:
            body = await reader.readexactly(int(fields.get("content-length", "0")))
        method, path, _ = line.split(" ")
        run = self.runs.get(path.split("/")[1], self.newest)
        if method != "POST" or not path.split("?")[0].endswith(SURFACES[run.surface].route):
            answer(writer, {"object": "list", "data": [{"id": "sim", "object": "model"}]}, method)
            return True
        asked = json.loads(body)
        surface = SURFACES[run.surface]
        main = bool(asked.get("tools")) or not run.tools
        if main:
            run.asked.append(body)
        if not asked.get("stream"):
            answer(writer, surface.plain(FINAL), method)
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream;"
            b" charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        first = main and len(run.asked) == 1
        for data in self._half(run, asked) if first else surface.whole(FINAL):
            send(writer, data)
            await writer.drain()
            await asyncio.sleep(0.05 if first else 0)
        ending = run.ending if first else WHOLE
        if ending.rest:
            send(writer, ending.rest)
        if ending.how == "end":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        await writer.drain()
        await asyncio.sleep(0.05)
        if ending.how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False

    def _half(self, run: Run, asked: Mapping[str, Any]) -> list[bytes]:
        surface = SURFACES[run.surface]
        if self.call:
            whole = self.call == "whole"
            called = call_of(surface.tools(asked), whole=whole)
            assert called is not None, [name for name, _ in surface.tools(asked)]
            return surface.call(*called, whole=whole)
        return surface.half(self.halves)


def answer(writer: asyncio.StreamWriter, value: object, method: str) -> None:
    """Write an answer that is no stream."""
    data = json.dumps(value).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(data)
    )
    writer.write(b"" if method == "HEAD" else data)


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
SHELL_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
SHELL = {
    "type": "function",
    "function": {"name": "shell", "description": "Run it", "parameters": SHELL_SCHEMA},
}
PY = f"""
import asyncio, json, sys
ASKED, TOOLS = [{{"role": "user", "content": "hi"}}], [{SHELL}]
def shell(command: str) -> str:
    "Run a command."
    open("ran", "w").write(command)
    return "done"
def run_all(calls):
    for each in calls:
        shell(**(json.loads(each) if isinstance(each, str) else each))
"""
PY_OPENAI = """
import openai
c = openai.OpenAI(base_url=sys.argv[1], api_key="k")
said, calls = "", {}
for x in c.chat.completions.create(model="sim", stream=True, messages=ASKED, tools=TOOLS):
    for delta in [choice.delta for choice in x.choices]:
        said += delta.content or ""
        for each in delta.tool_calls or []:
            calls[each.index] = calls.get(each.index, "") + (each.function.arguments or "")
print(said)
run_all(calls.values())
"""
PY_HELPER = """
import openai
c = openai.OpenAI(base_url=sys.argv[1], api_key="k")
with c.chat.completions.stream(model="sim", messages=ASKED, tools=TOOLS) as s:
    message = s.get_final_completion().choices[0].message
print(message.content)
run_all(each.function.arguments for each in message.tool_calls or [])
"""
PY_LANGCHAIN = """
import functools, operator
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1], api_key="k", model="sim").bind_tools(TOOLS)
message = functools.reduce(operator.add, model.stream("hi"))
print(message.content)
run_all(each["args"] for each in message.tool_calls)
"""
PY_LANGCHAIN_RETRY = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1], api_key="k", model="sim", streaming=True).bind_tools(TOOLS)
message = model.with_retry().invoke("hi")
print(message.content)
run_all(each["args"] for each in message.tool_calls)
"""
PY_DEEPAGENTS = """
from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1], api_key="k", model="sim", streaming=True)
agent = create_deep_agent(model=model, tools=[shell])
print(agent.invoke({"messages": ASKED})["messages"][-1].content)
"""
PY_DEEPAGENTS_RETRY = PY_DEEPAGENTS.replace(
    "tools=[shell]", "tools=[shell], middleware=[ModelRetryMiddleware()]"
).replace(
    "from deepagents",
    "from langchain.agents.middleware import ModelRetryMiddleware\nfrom deepagents",
)
PY_LITELLM = """
import litellm
base = sys.argv[1]
stream = litellm.completion(
    "openai/sim", api_base=base, api_key="k", stream=True, num_retries=2, messages=ASKED, tools=TOOLS
)
message = litellm.stream_chunk_builder(list(stream)).choices[0].message
print(message.content)
run_all(each.function.arguments for each in message.tool_calls or [])
"""
PY_PYDANTIC = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
async def main():
    model = OpenAIChatModel("sim", provider=OpenAIProvider(base_url=sys.argv[1], api_key="k"))
    async with Agent(model, tools=[shell]).run_stream("hi") as r:
        print(await r.get_output())
asyncio.run(main())
"""
PY_AGENTS = """
from agents import Agent, Runner, OpenAIChatCompletionsModel, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
async def main():
    m = OpenAIChatCompletionsModel(model="sim", openai_client=AsyncOpenAI(base_url=sys.argv[1], api_key="k"))
    r = Runner.run_streamed(Agent(name="a", model=m, tools=[function_tool(shell)]), "hi")
    async for _ in r.stream_events(): pass
    print(r.final_output)
asyncio.run(main())
"""
PY_SMOL = """
from smolagents import ToolCallingAgent, OpenAIServerModel
model = OpenAIServerModel("sim", api_base=sys.argv[1], api_key="k")
print("RESULT", ToolCallingAgent(tools=[], model=model, stream_outputs=True, max_steps=3).run("hi"))
"""
JS = f"""
import {{ writeFileSync }} from 'node:fs';
const schema = {json.dumps(SHELL_SCHEMA)}, tools = [{json.dumps(SHELL)}];
const shell = ({{command}}) => {{ writeFileSync('ran', command); return 'done'; }};
"""
JS_OPENAI = """
import OpenAI from 'openai';
const c = new OpenAI({baseURL: process.argv[2], apiKey: 'k'});
try {
  let t = '', calls = {};
  const messages = [{role: 'user', content: 'hi'}];
  for await (const x of await c.chat.completions.create({model: 'sim', stream: true, messages, tools})) {
    t += x.choices[0]?.delta?.content ?? '';
    const [e] = x.choices[0]?.delta?.tool_calls ?? [];
    if (e) calls[e.index] = (calls[e.index] ?? '') + e.function.arguments;
  }
  console.log(t);
  for (const e of Object.values(calls)) shell(JSON.parse(e));
} catch (e) { console.log('RAISED', e.constructor.name, e.message, e.code); process.exit(1); }
"""
JS_AI = """
import { streamText, stepCountIs, jsonSchema } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
const p = createOpenAICompatible({name: 'weir', baseURL: process.argv[2], apiKey: 'k'});
let failed = null;
const given = {shell: {inputSchema: jsonSchema(schema), execute: shell}}, stopWhen = stepCountIs(3);
const onError = ({error}) => { failed = error; };
const r = streamText({model: p('sim'), prompt: 'hi', tools: given, stopWhen, onError});
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
    surface: str = "chat"


def python(folder: str, script: str) -> Client:
    """A script for the environment in ``folder``."""
    return Client(lambda root, base: (str(root / folder / "bin/python"), "-c", PY + script, base))


def node(script: str) -> Client:
    """A script for the packages in ``node-sdk``."""

    def command(root: Path, base: str) -> Sequence[str]:
        place = root / "node-sdk" / f"run{abs(hash(script))}.mjs"
        place.write_text(JS + script)
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
                    "models": {
                        "sim": {"name": "sim", "limit": {"context": 128000, "output": 4096}}
                    },
                }
            },
        }
    )


def continue_(base: str) -> str:
    """A configuration with one model."""
    model = {
        "name": "sim",
        "provider": "openai",
        "model": "sim",
        "apiBase": base,
        "apiKey": "k",
        "roles": ["chat"],
    }
    return json.dumps({"name": "t", "version": "0.0.1", "schema": "v1", "models": [model]})


def codex(base: str) -> str:
    """A configuration with one model."""
    provider = f'name = "weir"\nbase_url = "{base}"\nwire_api = "responses"\nenv_key = "WEIR_KEY"\n'
    return f'model = "gpt-5"\nmodel_provider = "weir"\n[model_providers.weir]\n{provider}'


CLIENTS: Mapping[str, Client] = {
    "openai-py": python("py", PY_OPENAI),
    "openai-py .stream()": python("py", PY_HELPER),
    "openai-node": node(JS_OPENAI),
    "ai-sdk compatible": node(JS_AI),
    "ai-sdk openai.chat": node(JS_AI_OPENAI),
    "langchain stream": python("py", PY_LANGCHAIN),
    "langchain with_retry": python("py", PY_LANGCHAIN_RETRY),
    "deepagents": python("py-deepagents", PY_DEEPAGENTS),
    "deepagents retry": python("py-deepagents", PY_DEEPAGENTS_RETRY),
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
        lambda root, _: (
            *bin_of(root, "continuedev-cli", "cn"),
            "--config",
            "config.yaml",
            "-p",
            ASK,
        ),
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
    "codex": Client(
        lambda root, _: (
            *bin_of(root, "openai-codex", "codex"),
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            ASK,
        ),
        lambda base: {".codex/config.toml": codex(base)},
        lambda _: {"WEIR_KEY": "k"},
        tools=True,
        surface="responses",
    ),
    "claude-code": Client(
        lambda root, _: (
            str(
                root
                / "anthropic-ai-claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
            ),
            "-p",
            ASK,
            "--allowedTools",
            "Bash",
        ),
        env=lambda base: {
            "ANTHROPIC_BASE_URL": base.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "k",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        tools=True,
        surface="messages",
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run: ``ran`` says that the tool call of the broken answer was run."""

    asked: Sequence[bytes]
    code: int | None
    output: str
    ran: bool = False

    @property
    def verdict(self) -> str:
        """Whether the client went on, told its user of an error, or took half an answer for a whole
        one.
        """
        requests = len(self.asked)
        if requests == 0:
            return "never asked"
        ran = "RAN, " if self.ran else ""
        kept = (
            ", half kept" if any(half in body for body in self.asked[1:] for half in KEPT) else ""
        )
        if requests > 1 and MARK in self.output:
            return f"{ran}goes on ({requests}){kept}"
        if self.code is None:
            return f"{ran}hangs ({requests}){kept}"
        return (
            f"{ran}error ({requests})"
            if self.code or "RAISED" in self.output
            else f"{ran}exit 0 ({requests}){kept}"
        )


async def run(server: Server, root: Path, name: str, ending: str) -> Result:
    """One client in front of one ending."""
    client = CLIENTS[name]
    key = f"r{len(server.runs)}"
    server.runs[key] = given = Run(
        client.surface, SURFACES[client.surface].endings[ending], client.tools
    )
    base = (
        f"http://127.0.0.1:{server.weir}/v1"
        if server.weir
        else f"http://127.0.0.1:{server.port}/{key}/v1"
    )
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
        ran = any(Path(home).rglob("ran"))
    return Result(given.asked, code, output, ran)


async def execute(
    command: Sequence[str], folder: Path, env: Mapping[str, str]
) -> tuple[int | None, str]:
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


def newest(body: bytes) -> str:
    """The end of the conversation that a request holds."""
    asked = json.loads(body)
    said = asked.get("messages") or asked.get("input")
    return f"stream {asked.get('stream')}: " + "".join(
        json.dumps(each)[-400:] + "\n" for each in said[-3:]
    )


async def compare(server: Server, given: argparse.Namespace) -> None:
    """Each client that is asked for before each ending."""
    for name in given.only.split(",") if given.only else CLIENTS:
        endings = SURFACES[CLIENTS[name].surface].endings
        for ending in [
            each for each in endings if not given.endings or each in given.endings.split(";")
        ]:
            result = await run(server, given.clients.resolve(), name, ending)
            print(
                f"{name:22} {ending:26} {result.verdict:28}",
                result.output[-300:].replace("\n", " | ") if not given.show else "",
                flush=True,
            )
            if given.show:
                print(result.code, result.output[-3000:], *map(newest, result.asked[1:]), sep="\n")


async def main() -> None:
    """Run what is asked for, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--endings", default="")
    parser.add_argument("--unsaid", action="store_true")
    parser.add_argument("--call", choices=("half", "whole"))
    parser.add_argument("--weir", action="store_true", help="put Weir between them")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    server = Server(halves=() if given.unsaid else HALF, call=given.call)
    listening = await asyncio.start_server(server, "127.0.0.1", 0, limit=1 << 24)
    server.port = listening.sockets[0].getsockname()[1]
    with contextlib.ExitStack() as stack:
        if given.weir:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-client-")))
            cores = frozenset(os.sched_getaffinity(0))
            started = weir("weir", upstream=server.port, window=128000, cores=cores, home=home)
            server.weir = (await asyncio.to_thread(stack.enter_context, started)).port
        await compare(server, given)
    await asyncio.sleep(0.1)
    listening.close()


if __name__ == "__main__":
    asyncio.run(main())
