"""What ``POST /v1/messages`` refuses, in Anthropic's words: functions of the request alone.

:func:`violations` says all that is wrong. What takes the server's memory (signatures, threads) is judged by the
endpoint. Positions are those of the array as it was sent; messages of one role that follow one another are one turn.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.upstream.checks import Keys, keys_of, misshapen
from tests.upstream.window import Problem, Request

Block = Mapping[str, Any]

KEYS, BLOCKS = keys_of("messages"), keys_of("blocks")
ROLES = ("user", "assistant", "system")
INSIDE = ("text", "image", "search_result", "document", "tool_reference", "browser_state")
USERS = frozenset({"image", "document", "search_result", "tool_result", "container_upload"})
SYSTEMS = frozenset({"text", "tool_addition", "tool_removal"})
SHARED = frozenset({"text", "compaction", "tool_addition", "tool_removal"})
THINKING = frozenset({"thinking", "redacted_thinking"})
SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112")
MAX_MARKERS = 4
LEAST_BUDGET = 1024
LEAST_TRIGGER = 50_000
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")

AMOUNT = {"type": str, "value": int}
EDIT = {"type": str, "trigger": AMOUNT, "keep": (str, AMOUNT), "clear_at_least": AMOUNT, "exclude_tools": [str]}
MARKER = {"type": str, "ttl": str}
BLOCK = {
    **dict.fromkeys(("type", "text", "id", "tool_use_id", "thinking", "signature", "data", "encrypted_content"), str),
    "content": (str, [{"type": str, "text": str, "cache_control": MARKER}], {}),
    "cache_control": MARKER,
}
REQUEST = {
    "model": str,
    "messages": [{"role": str, "content": (str, [BLOCK])}],
    "system": (str, [{"type": str, "text": str, "cache_control": MARKER}]),
    "max_tokens": int,
    "stream": bool,
    "tools": [{"type": str, "name": str, "input_schema": {}, "cache_control": MARKER}],
    "tool_choice": {"type": str, "name": str},
    "thinking": {"type": str, "budget_tokens": int, "block_binding": {"prefix_mismatch_behavior": str}},
    "cache_control": MARKER,
    "context_management": {"edits": [EDIT]},
    "compaction": {"type": str, "instructions": str},
    "thread": {"type": str, "previous_message_id": str},
}


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    message: int
    index: int
    block: Block

    @property
    def path(self) -> str:
        return f"messages.{self.message}.content.{self.index}"

    @property
    def kind(self) -> str:
        return str(self.block.get("type"))


@dataclass(frozen=True, slots=True)
class Speech:
    role: str
    first: int
    blocks: tuple[PlacedBlock, ...]

    def of(self, *kinds: str) -> list[PlacedBlock]:
        return [placed for placed in self.blocks if placed.kind in kinds]


def blocks_of(content: Any) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or ())


def sides(messages: Sequence[Request]) -> list[Speech]:
    found: list[Speech] = []
    for index, message in enumerate(messages):
        blocks = tuple(PlacedBlock(index, at, block) for at, block in enumerate(blocks_of(message.get("content"))))
        if found and found[-1].role == message["role"]:
            found[-1] = Speech(found[-1].role, found[-1].first, found[-1].blocks + blocks)
        else:
            found.append(Speech(message["role"], index, blocks))
    return found


def thinks(body: Request) -> str | None:
    kind = (body.get("thinking") or {}).get("type")
    return None if kind == "disabled" else kind


def form(body: Request, *, counting: bool = False) -> Iterator[Problem]:
    if wrong := next(misshapen(body, REQUEST), None):
        yield wrong
        return
    yield from _keys(body, KEYS["count" if counting else "request"], "")
    if not body.get("messages"):
        yield Problem("messages: at least one message is required")
        return
    for index, message in enumerate(body["messages"]):
        yield from _message(message, f"messages.{index}", last=index == len(body["messages"]) - 1)
    for at, block in enumerate(blocks_of(body.get("system"))):
        yield from _block(block, f"system.{at}", frozenset({"text"}))
    yield from _tools(body)
    yield from _settings(body, counting=counting)
    yield from _markers(body)


def _keys(value: Block, keys: Keys, path: str) -> Iterator[Problem]:
    yield from (Problem(f"{path}{name}: Field required") for name in keys.needed if value.get(name) is None)
    yield from (Problem(f"{path}{name}: Extra inputs are not permitted") for name in value if name not in keys.known)


def _message(message: Request, path: str, *, last: bool) -> Iterator[Problem]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        yield Problem(f'messages: Unexpected role "{role}". Allowed roles are "user" or "assistant".')
        return
    yield from _keys({"content": "", **message}, KEYS[role], f"{path}.")
    content = message.get("content")
    if not content:
        if not last or role == "user":
            text = "all messages must have non-empty content except for the optional final assistant message"
            yield Problem(f"{path}: {text}")
        return
    allowed = {"user": USERS | SHARED, "system": SYSTEMS}.get(role, BLOCKS.keys() - USERS)
    for at, block in enumerate(blocks_of(content)):
        yield from _block(block, f"{path}.content.{at}", allowed, final=last and role == "assistant")


def _block(block: Block, path: str, allowed: frozenset[str] | set[str], *, final: bool = False) -> Iterator[Problem]:
    kind = str(block.get("type"))
    if kind not in BLOCKS and kind not in allowed:
        tags = ", ".join(f"'{name}'" for name in sorted(BLOCKS))
        yield Problem(f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags: {tags}")
        return
    if kind not in allowed:
        role = "user" if kind in USERS else "assistant"
        yield Problem(f"{path}: `{kind}` blocks can only be in `{role}` messages")
        return
    if kind in BLOCKS:
        yield from _keys(block, BLOCKS[kind], f"{path}.{kind}.")
    text = block.get("text")
    if kind == "text" and isinstance(text, str) and not text.strip():
        if block.get("cache_control"):
            yield Problem(f"{path}.text: cache_control cannot be set for empty text blocks")
        if not final:
            asks = "contain non-whitespace text" if text else "be non-empty"
            yield Problem(f"messages: text content blocks must {asks}")
    if kind in {"tool_use", "server_tool_use"} and not _NAME.fullmatch(str(block.get("id"))):
        yield Problem(f"{path}.{kind}.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
    if kind == "tool_result" and isinstance(block.get("content"), list):
        for at, inner in enumerate(block["content"]):
            yield from _block(inner, f"{path}.tool_result.content.{at}", frozenset(INSIDE))


def _tools(body: Request) -> Iterator[Problem]:
    tools, names = body.get("tools") or [], list[str]()
    for at, tool in enumerate(tools):
        names += [str(tool["name"])] if tool.get("name") else []
        if tool.get("type") in (None, "custom"):
            path = f"tools.{at}.custom"
            yield from _keys(tool, KEYS["tool"], f"{path}.")
            if tool.get("name") is not None and not _NAME.fullmatch(tool["name"]):
                yield Problem(f"{path}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
    if len(names) != len(set(names)):
        yield Problem("tools: Tool names must be unique.")
    choice = body.get("tool_choice") or {}
    if choice.get("type") in {"any", "tool"} and thinks(body) == "enabled":
        yield Problem("Thinking may not be enabled when tool_choice forces tool use.")
    if choice.get("type") == "tool" and choice.get("name") not in names:
        yield Problem(f"Tool '{choice.get('name')}' not found in provided tools")
    if choice.get("type") in {"any", "tool"} and not tools:
        yield Problem("tool_choice: tool_choice may only be specified while providing tools.")


def _settings(body: Request, *, counting: bool) -> Iterator[Problem]:
    asked, thinking = body.get("max_tokens"), body.get("thinking") or {}
    if asked is not None and asked < 1:
        yield Problem("max_tokens: Input should be greater than or equal to 1")
    if thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        if budget is None:
            yield Problem("thinking.enabled.budget_tokens: Field required")
        elif budget < LEAST_BUDGET:
            yield Problem("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
        elif asked is not None and budget >= asked and not counting:
            yield Problem("`max_tokens` must be greater than `thinking.budget_tokens`.")
    edits = (body.get("context_management") or {}).get("edits") or ()
    if body.get("compaction") and body.get("context_management"):
        yield Problem("`compaction` cannot be used together with `context_management`.")  # words: unknown
    for at, edit in enumerate(edits):
        kind, path = edit.get("type"), f"context_management.edits.{at}"
        if kind not in EDITS:
            tags = ", ".join(f"'{name}'" for name in EDITS)
            yield Problem(
                f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags: {tags}"
            )
        elif kind == "clear_thinking_20251015" and not thinks(body):
            yield Problem("`clear_thinking_20251015` strategy requires `thinking` to be enabled")
        elif kind == "compact_20260112" and (edit.get("trigger") or {}).get("value", LEAST_TRIGGER) < LEAST_TRIGGER:
            text = f"Input should be greater than or equal to {LEAST_TRIGGER}"
            yield Problem(f"{path}.compact_20260112.trigger.value: {text}")


def _markers(body: Request) -> Iterator[Problem]:
    """At most four, and none with the longer life behind one with the shorter."""
    found: list[tuple[str, Any]] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            if value.get("cache_control"):
                found.append((path, value["cache_control"]))
            walk(f"{path}.content", value.get("content"))
        elif isinstance(value, list):
            for at, one in enumerate(value):
                walk(f"{path}.{at}", one)

    for name in ("tools", "system", "messages"):
        walk(name, body.get(name))
    if body.get("cache_control"):
        found.append(("cache_control", body["cache_control"]))
    if len(found) > MAX_MARKERS:
        text = f"A maximum of {MAX_MARKERS} blocks with cache_control may be provided. Found {len(found)}."
        yield Problem(text)
    short = False
    for path, marker in found:
        if marker.get("ttl") == "1h" and short:
            text = "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks"
            yield Problem(
                f"{path}.cache_control.ttl: {text} are processed in the following order: `tools`, `system`, `messages`."
            )
        short = short or marker.get("ttl", "5m") == "5m"


def sequence(body: Request, messages: Sequence[Request], *, goes_on: bool = False) -> Iterator[Problem]:
    turns = sides(messages)
    first = turns[0]
    if first.role == "system":
        text = 'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, '
        yield Problem(text + 'not "system" as an input message role.')
    elif first.role != "user" and not goes_on and not (first.blocks and first.blocks[0].kind == "compaction"):
        yield Problem('messages: first message must use the "user" role')
    yield from _systems(turns)
    yield from _results(turns, goes_on=goes_on)
    yield from _server_results(turns)
    yield from _ending(body, turns)
    yield from _compactions(turns)


def _systems(turns: Sequence[Speech]) -> Iterator[Problem]:
    for at, turn in enumerate(turns[1:], start=1):
        if turn.role != "system":
            continue
        if turns[at - 1].role != "user" or (at + 1 < len(turns) and turns[at + 1].role != "assistant"):
            text = "`system` messages must follow a `user` message and come before an `assistant` message or the end."
            yield Problem(f"messages.{turn.first}: {text}")  # words: unknown


def _results(turns: Sequence[Speech], *, goes_on: bool) -> Iterator[Problem]:
    seen: set[str] = set()
    asked: list[str] = []
    before: Speech | None = None
    for at, turn in enumerate(turns):
        if turn.role == "system":
            continue
        leading = 0
        while leading < len(turn.blocks) and turn.blocks[leading].kind == "tool_result":
            leading += 1
        given = [str(placed.block.get("tool_use_id")) for placed in turn.blocks[:leading]]
        if before is not None:
            absent = [name for name in asked if name not in given]
            if absent:
                yield _unanswered(before, absent)
        yield from _strays(turn, asked, known=not (goes_on and at == 0))
        asked, before = [], turn
        for placed in turn.of("tool_use"):
            name = str(placed.block.get("id"))
            if name in seen:
                yield Problem(f"{placed.path}: `tool_use` ids must be unique")
            seen.add(name)
            asked.append(name)
    if asked and before is not None:
        yield _unanswered(before, asked)


def _strays(turn: Speech, asked: Sequence[str], *, known: bool) -> Iterator[Problem]:
    answered: set[str] = set()
    for placed in turn.of("tool_result"):
        name = str(placed.block.get("tool_use_id"))
        if name in answered:
            text = f"each tool_use must have a single result. Found multiple `tool_result` blocks with id: {name}"
            yield Problem(f"{placed.path}: {text}")
        elif name not in asked and known:
            yield Problem(
                f"{placed.path}: unexpected `tool_use_id` found in `tool_result` blocks: {name}. Each `tool_result` "
                "block must have a corresponding `tool_use` block in the previous message."
            )
        answered.add(name)


def _unanswered(turn: Speech, names: Sequence[str]) -> Problem:
    index = next((placed.message for placed in turn.blocks if placed.block.get("id") == names[0]), turn.first)
    return Problem(
        f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(names)}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def _server_results(turns: Sequence[Speech]) -> Iterator[Problem]:
    """A server's tool is answered in the turn that calls it, or goes on where a client's tool came between."""
    speaking = [turn for turn in turns if turn.role == "assistant"]
    called: set[str] = set()
    for turn in speaking:
        open_calls: dict[str, PlacedBlock] = {}
        for placed in turn.blocks:
            if placed.kind in SERVER_CALLS:
                open_calls[str(placed.block.get("id"))] = placed
            elif placed.kind.endswith("_tool_result"):
                name = str(placed.block.get("tool_use_id"))
                if open_calls.pop(name, None) is None and name not in called:
                    yield Problem(
                        f"{placed.path}: unexpected `tool_use_id` found in `{placed.kind}` blocks: {name}. Each "
                        f"`{placed.kind}` block must have a corresponding `server_tool_use` block before it."
                    )
        called.update(open_calls)
        if turn is not speaking[-1] and not turn.of("tool_use"):
            for name, placed in open_calls.items():
                tool = placed.block.get("name")
                yield Problem(
                    f"{placed.path}: `{tool}` tool use with id `{name}` was found without a corresponding "
                    f"`{tool}_tool_result` block"
                )


def _ending(body: Request, turns: Sequence[Speech]) -> Iterator[Problem]:
    last = turns[-1]
    if last.role == "assistant" and not body.get("compaction"):
        if thinks(body) and not last.of(*SERVER_CALLS):
            text = (
                "This model does not support assistant message prefill. The conversation must end with a user message."
            )
            yield Problem(text)
        text = last.blocks[-1].block.get("text", "") if last.blocks else ""
        if text != text.rstrip():
            yield Problem("messages: final assistant content cannot end with trailing whitespace")
    asking = next((turn for turn in reversed(turns) if turn.role == "assistant"), None)
    if thinks(body) != "enabled" or asking is None or not asking.of("tool_use") or last is asking:
        return
    final = [placed for placed in asking.blocks if placed.message == asking.blocks[-1].message]
    if final[0].kind not in THINKING:
        yield Problem(
            f"{final[0].path}.type: Expected `thinking` or `redacted_thinking`, but found `{final[0].kind}`. When "
            "`thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding the "
            "lastmost set of `tool_use` and `tool_result` blocks). We recommend you include thinking blocks from "
            "previous turns. To avoid this requirement, disable `thinking`."
        )


def _compactions(turns: Sequence[Speech]) -> Iterator[Problem]:
    """A signed summary stands first and alone; one that the server wrote on its own stands where it was written."""
    signed = [p for turn in turns for p in turn.of("compaction") if p.block.get("signature") and p.block.get("content")]
    if len(signed) > 1:
        text = "`messages` holds more than one `compaction` block with content."
        yield coded(text, "compaction_block_ambiguous")
    for placed in signed:
        if (placed.message, placed.index) != (0, 0):
            text = f"{placed.path}: the `compaction` block must be the first block of the conversation."
            yield coded(text, "compaction_block_misplaced")


def coded(text: str, code: str, *, status: int = 400, **more: Any) -> Problem:
    return Problem(message=text, status=status, extra={"details": {"error_code": code, **more}})
