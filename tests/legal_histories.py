"""Random conversations that a strict provider takes, as the arrays of each endpoint, request by request.

An array grows by events; after each that ends on the client's side there is a request. What is random is seeded.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.functional.harness import prose

Item = dict[str, Any]
SIZES = (0, 3, 12, 40, 40, 120, 120, 300, 900)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAYAAAA10dzk"


@dataclass
class Writer:
    """What the writers of all endpoints have: a seed, numbers for ids, texts."""

    rng: random.Random
    number: int = 0
    array: list[Item] = field(default_factory=list)

    def name(self, prefix: str) -> str:
        self.number += 1
        return f"{prefix}_{self.rng.randrange(16**6):06x}{self.number:04d}"

    def text(self, least: int = 1) -> str:
        words = max(least, self.rng.choice(SIZES))
        said = prose(words, seed=self.rng.randrange(10**6))
        return said if self.rng.random() < 0.9 else f"{said} \u2028 \U0001f600 é 'quoted' \\ {{}}"

    def chance(self, share: float) -> bool:
        return self.rng.random() < share


def responses(seed: int, *, events: int = 14, fields: Item | None = None) -> Iterator[bytes]:
    """The requests of one conversation on ``/v1/responses``."""
    writer = ResponsesWriter(random.Random(seed))
    writer.stores = writer.chance(0.4)
    body = {
        "model": "gpt-5",
        "store": writer.stores,
        "tools": writer.tools(),
        "max_output_tokens": 256,
        **(fields or {}),
    }
    if writer.chance(0.6):
        body["instructions"] = writer.text()
    if writer.chance(0.3):
        writer.array.append({"type": "message", "role": "developer", "content": writer.parts()})
    writer.user()
    yield encoded(body, "input", writer.array)
    for _ in range(events):
        writer.rng.choice(writer.events)()
        yield encoded(body, "input", writer.array)


@dataclass
class ResponsesWriter(Writer):
    """Writes items."""

    stores: bool = False

    def tools(self) -> list[Item]:
        shape = {"type": "object", "properties": {"q": {"type": "string"}}}
        plain = [{"type": "function", "name": n, "parameters": shape, "strict": False} for n in ("read", "run")]
        inner = {"type": "namespace", "name": "files", "description": "Files.", "tools": [plain[0] | {"name": "ls"}]}
        return [*plain, {"type": "custom", "name": "patch"}, {"type": "web_search"}, inner]

    @property
    def events(self) -> list[Callable[[], None]]:
        rare = [self.late, self.hosted, self.developer, self.wall, self.referred, self.computer, self.searched]
        return [*[self.step] * 8, *[self.interleaved] * 2, *[self.talk] * 3, self.user, *rare]

    def parts(self) -> Any:
        if self.chance(0.4):
            return self.text()
        parts: list[Item] = [{"type": "input_text", "text": self.text()} for _ in range(self.rng.choice((1, 1, 2)))]
        if self.chance(0.2):
            parts.append({"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PIXEL}"})
        if self.chance(0.1):
            parts[0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
        return parts

    def user(self) -> None:
        typed = {"type": "message"} if self.chance(0.6) else {}
        self.array.append({**typed, "role": "user", "content": self.parts()})

    def developer(self) -> None:
        self.array.append(
            {"type": "message", "role": self.rng.choice(("developer", "system")), "content": self.parts()}
        )
        if self.chance(0.5):
            self.user()

    def thought(self) -> None:
        item: Item = {"type": "reasoning", "id": self.name("rs"), "encrypted_content": f"gAAA{self.text(20)}"}
        item["summary"] = [{"type": "summary_text", "text": self.text()}] if self.chance(0.4) else []
        if self.chance(0.2):
            item["content"] = None
        self.array.append(item)

    def said(self, phase: str) -> None:
        if self.chance(0.3):
            self.array.append({"role": "assistant", "content": self.text()})
            return
        part = {"type": "output_text", "text": self.text(), "annotations": [], "logprobs": []}
        item = {"type": "message", "id": self.name("msg"), "role": "assistant", "status": "completed"}
        self.array.append({**item, "phase": phase, "content": [part]})

    def call(self) -> Item:
        """A call; its output is given back."""
        name, id_ = self.name("call"), {"id": self.name("fc")} if self.chance(0.6) else {}
        kind = self.rng.choice(("function", "function", "function", "custom", "local_shell", "shell", "apply_patch"))
        output: Any = self.text() if self.chance(0.8) else self.output_parts()
        if kind == "function":
            arguments = json.dumps({"q": self.text()})
            self.array.append({"type": "function_call", **id_, "call_id": name, "name": "read", "arguments": arguments})
        elif kind == "custom":
            id_ = {"id": self.name("ctc")} if id_ else {}
            self.array.append(
                {"type": "custom_tool_call", **id_, "call_id": name, "name": "patch", "input": self.text()}
            )
            return {"type": "custom_tool_call_output", "call_id": name, "output": output}
        elif kind == "local_shell":
            action = {"type": "exec", "command": ["ls"], "env": {}}
            self.array.append(
                {
                    "type": kind + "_call",
                    "id": self.name("ls"),
                    "call_id": name,
                    "action": action,
                    "status": "completed",
                }
            )
            return {"type": "local_shell_call_output", "id": name, "output": json.dumps({"output": self.text()})}
        elif kind == "shell":
            self.array.append({"type": "shell_call", "call_id": name, "action": {"commands": ["ls", "pwd"]}})
            chunk = {"stdout": self.text(), "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
            return {"type": "shell_call_output", "call_id": name, "output": [chunk, {**chunk, "stderr": self.text()}]}
        else:
            operation = {"type": "update_file", "path": "a.py", "diff": self.text()}
            self.array.append(
                {"type": "apply_patch_call", "call_id": name, "operation": operation, "status": "completed"}
            )
            return {"type": "apply_patch_call_output", "call_id": name, "status": "completed", "output": self.text()}
        return {"type": "function_call_output", "call_id": name, "output": output}

    def output_parts(self) -> list[Item]:
        parts: list[Item] = [{"type": "input_text", "text": self.text()}]
        if self.chance(0.4):
            parts.append({"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PIXEL}"})
        return parts

    def step(self) -> None:
        if self.chance(0.6):
            self.thought()
        if self.chance(0.4):
            self.said("commentary")
        outputs = [self.call() for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
        self.rng.shuffle(outputs)
        self.array += outputs

    def interleaved(self) -> None:
        """Parallel calls that share one reasoning, each followed by its output."""
        self.thought()
        for _ in range(self.rng.choice((2, 3))):
            self.array.append(self.call())

    def late(self) -> None:
        """An output that comes after something else."""
        first, second = self.call(), self.call()
        self.array.append(second)
        self.rng.choice((self.user, self.step, self.developer))()
        self.array.append(first)

    def talk(self) -> None:
        if self.chance(0.5):
            self.thought()
        self.said("final_answer")
        self.user()

    def hosted(self) -> None:
        self.thought()
        action = {"type": "search", "query": self.text()}
        self.array.append({"type": "web_search_call", "id": self.name("ws"), "status": "completed", "action": action})
        code = {"type": "code_interpreter_call", "id": self.name("ci"), "container_id": "c", "code": self.text()}
        self.array.append({**code, "outputs": None, "status": "completed"})
        mcp = {"type": "mcp_call", "id": self.name("mcp"), "arguments": "{}", "name": "ask", "server_label": "s"}
        self.array.append({**mcp, "output": self.text()})
        self.said("final_answer")
        self.user()

    def wall(self) -> None:
        self.array.append({"type": "compaction", "id": self.name("cmp"), "encrypted_content": f"gAAA{self.text()}"})
        self.user()

    def referred(self) -> None:
        """With a store: a reference is all that is sent of what the model thought and said."""
        if not self.stores:
            return self.talk()
        self.array.append({"type": "item_reference", "id": self.name("rs")})
        if self.chance(0.5):
            self.array.append({"type": "item_reference", "id": self.name("msg")})
            return self.user()
        self.array.append(self.call())
        return None

    def computer(self) -> None:
        name = self.name("call")
        call = {"type": "computer_call", "id": self.name("cu"), "call_id": name, "pending_safety_checks": []}
        self.array.append({**call, "action": {"type": "screenshot"}, "status": "completed"})
        shot = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PIXEL}"}
        self.array.append({"type": "computer_call_output", "call_id": name, "output": shot})

    def searched(self) -> None:
        name = self.name("call")
        call = {"type": "tool_search_call", "call_id": name, "execution": "client", "arguments": {"q": "x"}}
        self.array.append({**call, "status": "completed"})
        tool = {"type": "function", "name": "found", "parameters": {"type": "object", "properties": {}}}
        self.array.append({"type": "tool_search_output", "call_id": name, "tools": [tool], "status": "completed"})


def messages(seed: int, *, events: int = 14, fields: Item | None = None) -> Iterator[bytes]:
    """The requests of one conversation on ``/v1/messages``."""
    writer = MessagesWriter(random.Random(seed))
    body = {"model": "claude-sonnet-4-5", "max_tokens": 256, "tools": writer.tools(), **(fields or {})}
    if writer.chance(0.7):
        body["system"] = writer.text() if writer.chance(0.5) else [writer.block(), writer.block()]
    if writer.chance(0.4):
        body["thinking"] = {"type": "adaptive"}
    writer.marks = writer.chance(0.4)
    writer.user()
    yield encoded(body, "messages", writer.sent())
    for _ in range(events):
        writer.rng.choice(writer.events)()
        yield encoded(body, "messages", writer.sent())


@dataclass
class MessagesWriter(Writer):
    """Writes messages of blocks."""

    marks: bool = False

    def tools(self) -> list[Item]:
        shape = {"type": "object", "properties": {"q": {"type": "string"}}}
        plain = [{"name": n, "input_schema": shape} for n in ("read", "run")]
        return [*plain, {"type": "web_search_20260318", "name": "web_search"}]

    def sent(self) -> list[Item]:
        """The array, with a marker on its last block where the client moves one along."""
        if not self.marks or self.array[-1]["role"] != "user":
            return self.array
        last = {**self.array[-1]}
        blocks = (
            [*last["content"]] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
        )
        blocks[-1] = {**blocks[-1], "cache_control": {"type": "ephemeral"}}
        return [*self.array[:-1], {**last, "content": blocks}]

    @property
    def events(self) -> list[Callable[[], None]]:
        rare = [self.served, self.notice, self.split, self.apart, self.pictured, self.compacted, self.paused]
        return [*[self.step] * 9, *[self.talk] * 3, self.user, *rare]

    def block(self) -> Item:
        return {"type": "text", "text": self.text()}

    def user(self) -> None:
        content: Any = self.text() if self.chance(0.5) else [self.block() for _ in range(self.rng.choice((1, 1, 2)))]
        self.array.append({"role": "user", "content": content})

    def thought(self) -> list[Item]:
        if self.chance(0.2):
            return [{"type": "redacted_thinking", "data": self.name("data") + self.text()}]
        said = self.text() if self.chance(0.7) else ""
        return [{"type": "thinking", "thinking": said, "signature": self.name("sig") + "x" * self.rng.choice((4, 400))}]

    def calls(self, count: int) -> list[Item]:
        return [
            {"type": "tool_use", "id": self.name("toolu"), "name": "read", "input": {"q": self.text()}}
            for _ in range(count)
        ]

    def result(self, call: Item) -> Item:
        found: Item = {"type": "tool_result", "tool_use_id": call["id"]}
        shape = self.rng.choice(("text", "text", "text", "blocks", "empty", "image", "none"))
        if shape == "text":
            found["content"] = self.text()
        elif shape == "blocks":
            found["content"] = [self.block() for _ in range(self.rng.choice((1, 2)))]
        elif shape == "image":
            found["content"] = [self.block(), self.image()]
        elif shape == "empty":
            found["content"] = ""
        if self.chance(0.1):
            found["is_error"] = True
        return found

    def image(self) -> Item:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}

    def step(self, *, behind: list[Item] | None = None) -> None:
        calls = self.calls(self.rng.choice((1, 1, 1, 2, 3)))
        thoughts = self.thought() if self.chance(0.6) else []
        text = [self.block()] if self.chance(0.4) else []
        self.array.append({"role": "assistant", "content": [*thoughts, *text, *calls]})
        results = [self.result(call) for call in calls]
        self.rng.shuffle(results)
        more = behind or ([self.block()] if self.chance(0.15) else [])
        self.array.append({"role": "user", "content": [*results, *more]})

    def talk(self) -> None:
        thoughts = self.thought() if self.chance(0.4) else []
        content: Any = [*thoughts, self.block()] if thoughts or self.chance(0.6) else self.text()
        self.array.append({"role": "assistant", "content": content})
        self.user()

    def served(self) -> None:
        """A server's tool, called and answered in the model's turn."""
        name = self.name("srvtoolu")
        found = [{"type": "web_search_result", "url": "http://x", "title": "x", "encrypted_content": self.text()}]
        self.array.append(
            {
                "role": "assistant",
                "content": [
                    *self.thought(),
                    {"type": "server_tool_use", "id": name, "name": "web_search", "input": {"query": self.text()}},
                    {"type": "web_search_tool_result", "tool_use_id": name, "content": found},
                    self.block(),
                ],
            }
        )
        self.user()

    def notice(self) -> None:
        """A message of the system's between a user's and an assistant's."""
        if self.array[-1]["role"] == "user":
            self.array.append({"role": "system", "content": self.text()})
            self.step() if self.chance(0.7) else self.talk()

    def split(self) -> None:
        """Results of one turn in two user messages."""
        calls = self.calls(2)
        self.array.append({"role": "assistant", "content": [*self.thought(), *calls]})
        for call in calls:
            self.array.append({"role": "user", "content": [self.result(call)]})
        if self.chance(0.5):
            self.user()

    def apart(self) -> None:
        """Two assistant messages that are one turn."""
        if self.array[-1]["role"] == "assistant":
            return
        calls = self.calls(1)
        self.array.append({"role": "assistant", "content": [*self.thought(), self.block()]})
        self.array.append({"role": "assistant", "content": calls})
        self.array.append({"role": "user", "content": [self.result(calls[0])]})

    def pictured(self) -> None:
        document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": self.text()}}
        self.array.append({"role": "assistant", "content": [self.block()]})
        self.array.append({"role": "user", "content": [self.image(), document, self.block()]})

    def compacted(self) -> None:
        """The provider summed up what stands before, in the model's turn."""
        block = {"type": "compaction", "content": self.text(), "encrypted_content": self.name("c")}
        self.array.append({"role": "assistant", "content": [block, self.block()]})
        self.user()

    def paused(self) -> None:
        """A pause_turn: the model goes on with what a server's tool will say."""
        name = self.name("srvtoolu")
        found = [{"type": "web_search_result", "url": "http://x", "title": "x", "encrypted_content": self.text()}]
        use = {"type": "server_tool_use", "id": name, "name": "web_search", "input": {"query": "x"}}
        self.array.append({"role": "assistant", "content": [self.block(), use]})
        back = {"type": "web_search_tool_result", "tool_use_id": name, "content": found}
        self.array.append({"role": "assistant", "content": [back, self.block()]})
        self.user()


def chat(seed: int, *, events: int = 14, fields: Item | None = None) -> Iterator[bytes]:
    """The requests of one conversation on ``/v1/chat/completions``."""
    writer = ChatWriter(random.Random(seed))
    body = {"model": "gpt-4o", "tools": writer.tools(), "max_tokens": 256, **(fields or {})}
    if writer.chance(0.7):
        writer.array.append({"role": writer.rng.choice(("system", "developer")), "content": writer.text()})
    writer.user()
    yield encoded(body, "messages", writer.array)
    for _ in range(events):
        writer.rng.choice(writer.events)()
        yield encoded(body, "messages", writer.array)


@dataclass
class ChatWriter(Writer):
    """Writes messages of chat completions."""

    def tools(self) -> list[Item]:
        shape = {"type": "object", "properties": {"q": {"type": "string"}}}
        plain = [{"type": "function", "function": {"name": n, "parameters": shape}} for n in ("read", "run")]
        return [*plain, {"type": "custom", "custom": {"name": "patch"}}]

    @property
    def events(self) -> list[Callable[[], None]]:
        return [*[self.step] * 9, *[self.talk] * 3, self.user, self.notice, self.pictured]

    def content(self) -> Any:
        return self.text() if self.chance(0.7) else [{"type": "text", "text": self.text()} for _ in range(2)]

    def user(self) -> None:
        self.array.append({"role": "user", "content": self.content()})

    def notice(self) -> None:
        self.array.append({"role": "system", "content": self.text()})
        self.user()

    def pictured(self) -> None:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        self.array.append({"role": "user", "content": [{"type": "text", "text": self.text()}, image]})

    def call(self) -> Item:
        if self.chance(0.2):
            return {"id": self.name("call"), "type": "custom", "custom": {"name": "patch", "input": self.text()}}
        arguments = json.dumps({"q": self.text()})
        return {"id": self.name("call"), "type": "function", "function": {"name": "read", "arguments": arguments}}

    def step(self) -> None:
        calls = [self.call() for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
        said: Item = {"role": "assistant", "content": self.text() if self.chance(0.4) else None, "tool_calls": calls}
        if self.chance(0.3):
            said["reasoning_content"] = self.text()
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": "" if self.chance(0.1) else self.content()}
            for each in calls
        ]
        self.rng.shuffle(results)
        self.array += [said, *results]

    def talk(self) -> None:
        said: Item = {"role": "assistant", "content": self.content()}
        if self.chance(0.2):
            said = {"role": "assistant", "content": None, "refusal": self.text()}
        self.array.append(said)
        self.user()


def encoded(body: Item, field: str, array: list[Item]) -> bytes:
    return json.dumps({**body, field: array}, ensure_ascii=False).encode("utf-8", "surrogatepass")
