"""What ``POST /v1/responses`` refuses, in OpenAI's words: functions of the request alone.

What takes the server's memory (stored items, sealed reasoning, chains) is judged by the endpoint, which hands
:func:`sequence` the items as they stand once references are resolved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.upstream.checks import MAX_TOOLS, keys_of, misshapen, missing, not_one_of, too_long, too_small, unknown
from tests.upstream.window import Problem, Request

Item = Mapping[str, Any]

FIELDS = keys_of("responses")["request"].known
ITEMS, PARTS, TOOLS = keys_of("items"), keys_of("parts"), keys_of("response tools")
INPUT_PARTS = ("input_text", "input_image", "input_file", "input_audio")
ROLES = ("assistant", "system", "developer", "user")
CALLS: Mapping[str, tuple[str, str]] = {
    "function_call": ("function_call_output", "function call"),
    "custom_tool_call": ("custom_tool_call_output", "custom tool call"),
    "local_shell_call": ("local_shell_call_output", "local shell call"),
    "shell_call": ("shell_call_output", "shell call"),
    "apply_patch_call": ("apply_patch_call_output", "apply patch call"),
    "computer_call": ("computer_call_output", "computer call"),
    "program": ("program_output", "program"),
}
OUTPUTS = {output: call for call, (output, _) in CALLS.items()}
HOSTED = frozenset(name for name in ITEMS if name.endswith("_call") or name.startswith("mcp_")) - {
    *CALLS,
    "mcp_approval_response",
}
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "compaction": "cmp"}
MAX_ID = 64
LEAST_OUTPUT = 16

REQUEST = {
    "model": str,
    "input": (str, [{}]),
    "instructions": str,
    "tools": [{"type": str, "name": str, "tools": [{"type": str, "name": str}]}],
    "tool_choice": (str, {"type": str, "name": str, "tools": [{}]}),
    "text": {"format": {"type": str, "name": str, "schema": {}}},
    "max_output_tokens": int,
    "previous_response_id": str,
    "conversation": (str, {"id": str}),
    "store": bool,
    "stream": bool,
    "stream_options": {"include_obfuscation": bool},
    "include": [str],
    "reasoning": {"effort": str, "summary": str, "context": str},
    "truncation": str,
    "context_management": [{"type": str, "compact_threshold": int}],
}
PART = {"type": str, "text": str, "refusal": str}
ITEM = {
    "type": str,
    "id": str,
    "call_id": str,
    "role": str,
    "name": str,
    "namespace": str,
    "encrypted_content": str,
    "content": (str, [PART]),
    "output": (str, [PART], {}),
    "summary": [PART],
}
STRINGS = {"function_call": "arguments", "mcp_call": "arguments", "custom_tool_call": "input"}


def items_of(body: Request) -> list[Item]:
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given or ())


def kind_of(item: Item) -> str:
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def is_model(item: Item) -> bool:
    kind = kind_of(item)
    if kind == "message":
        return item.get("role") == "assistant"
    return kind in CALLS or kind in HOSTED or kind in {"reasoning", "item_reference"}


def is_reasoning(item: Item) -> bool:
    return kind_of(item) == "reasoning" or (kind_of(item) == "item_reference" and str(item.get("id"))[:3] == "rs_")


def form(body: Request, *, open_server: bool = False) -> Iterator[Problem]:
    if wrong := next(shapes(body), None):
        yield wrong
        return
    if not open_server:
        yield from (unknown(name) for name in body if name not in FIELDS)
    yield from _envelope(body)
    for at, item in enumerate(items_of(body)):
        yield from _item(item, f"input[{at}]", open_server=open_server)
    yield from _tools(body)


def shapes(body: Request) -> Iterator[Problem]:
    yield from misshapen(body, REQUEST)
    for at, item in enumerate(items_of(body)):
        yield from misshapen(item, {**ITEM, STRINGS.get(kind_of(item), "type"): str}, f"input[{at}].")


def _envelope(body: Request) -> Iterator[Problem]:
    if not body.get("model") and not body.get("prompt"):
        yield missing("model")
    named = [name for name in ("input", "previous_response_id", "prompt", "conversation") if body.get(name)]
    if not named:
        text = "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation_id' must be provided."
        yield Problem(text, "input", "missing_required_parameter")
    if body.get("previous_response_id") and body.get("conversation"):
        text = "Mutually exclusive parameters. Ensure you are only providing one of: 'previous_response_id' or"
        yield Problem(f"{text} 'conversation'.", "previous_response_id", "mutually_exclusive_parameters")
    if body.get("stream_options") is not None and not body.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        yield Problem(text, "stream_options")
    asked = body.get("max_output_tokens")
    if asked is not None and asked < LEAST_OUTPUT:
        yield too_small("max_output_tokens", LEAST_OUTPUT, asked)
    if body.get("truncation") not in (None, "auto", "disabled"):
        yield not_one_of(("auto", "disabled"), body["truncation"], "truncation")


def _item(item: Item, path: str, *, open_server: bool) -> Iterator[Problem]:
    kind = kind_of(item)
    keys = ITEMS.get(kind)
    if keys is None or (open_server and kind.startswith("compaction")):
        known = [name for name in sorted(ITEMS) if not (open_server and name.startswith("compaction"))]
        yield not_one_of(known, kind, f"{path}.type")
        return
    yield from (unknown(f"{path}.{name}") for name in item if name not in keys.known)
    yield from (missing(f"{path}.{name}") for name in keys.needed if item.get(name) is None)
    yield from _ids(item, kind, path)
    if kind == "reasoning":
        yield from _parts(item.get("summary"), f"{path}.summary", ("summary_text",))
        if item.get("content") and not open_server:
            yield too_long(f"{path}.content", "array", 0, len(item["content"]))
    elif kind == "message" and item.get("role") not in ROLES:
        yield not_one_of(ROLES, item.get("role"), f"{path}.role")
    elif kind == "message":
        allowed = ("output_text", "refusal") if item["role"] == "assistant" else INPUT_PARTS
        yield from _parts(item.get("content"), f"{path}.content", allowed)
    elif kind in {"function_call_output", "custom_tool_call_output"}:
        yield from _parts(item.get("output"), f"{path}.output", INPUT_PARTS[:3])


def _parts(content: Any, path: str, allowed: Sequence[str]) -> Iterator[Problem]:
    if not isinstance(content, list):
        return
    for at, part in enumerate(content):
        kind, where = part.get("type"), f"{path}[{at}]"
        if kind not in allowed:
            yield not_one_of(allowed, kind, f"{where}.type")
            continue
        yield from (unknown(f"{where}.{name}") for name in part if name not in PARTS[kind].known)
        yield from (missing(f"{where}.{name}") for name in PARTS[kind].needed if part.get(name) is None)


def _ids(item: Item, kind: str, path: str) -> Iterator[Problem]:
    for name in ("id", "call_id"):
        value = item.get(name)
        if value is not None and len(value) > MAX_ID:
            yield too_long(f"{path}.{name}", "string", MAX_ID, len(value))
    given, prefix = item.get("id"), PREFIXES.get(kind)
    if given is not None and prefix is not None and not given.startswith(prefix):
        text = f"Invalid '{path}.id': '{given}'. Expected an ID that begins with '{prefix}'."
        yield Problem(text, f"{path}.id", "invalid_value")


def _tools(body: Request) -> Iterator[Problem]:
    tools = body.get("tools") or []
    if len(tools) > MAX_TOOLS:
        yield too_long("tools", "array", MAX_TOOLS, len(tools))
    for at, tool in enumerate(tools):
        yield from _tool(tool, f"tools[{at}]", TOOLS)
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in {"none", "auto", "required"}:
        yield not_one_of(("none", "auto", "required"), choice, "tool_choice")
    elif choice == "required" and not tools:
        text = "Tool choice 'required' must be specified with 'tools' parameter."
        yield Problem(text, "tool_choice")
    elif isinstance(choice, dict):
        wanted = [choice] if choice.get("type") != "allowed_tools" else choice.get("tools") or []
        there = {name for tool in tools for name in tool_names(tool)} | {tool.get("type") for tool in tools}
        for name in (one.get("name") or one.get("type") for one in wanted):
            if name not in there:
                yield Problem(f"Tool choice '{name}' not found in 'tools' parameter.", "tool_choice")


def _tool(tool: Item, path: str, kinds: Mapping[str, Any]) -> Iterator[Problem]:
    kind = str(tool.get("type"))
    if kind not in kinds:
        yield not_one_of(sorted(kinds), tool.get("type"), f"{path}.type")
        return
    yield from (missing(f"{path}.{name}") for name in kinds[kind].needed if not tool.get(name))
    yield from (unknown(f"{path}.{name}") for name in tool if name not in kinds[kind].known)
    if kind == "namespace":
        inner = {name: TOOLS[name] for name in ("function", "custom")}
        for at, member in enumerate(tool.get("tools") or ()):
            yield from _tool(member, f"{path}.tools[{at}]", inner)


def tool_names(tool: Item) -> Iterator[str]:
    members = tool.get("tools") or () if tool.get("type") == "namespace" else (tool,)
    return (str(member["name"]) for member in members if member.get("name"))


def not_found(name: object) -> Problem:
    text = (
        f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. Try again with `store`"
        " set to true, or remove this item from your input."
    )
    return Problem(message=text, status=404, param="input")


def sequence(items: Sequence[Item], *, known: bool = True) -> Iterator[Problem]:
    """What is wrong with the order of items; ``known`` False where others stand before them that nobody can see."""
    yield from _duplicates(items)
    yield from _pairs(items, known=known)
    for at, item in enumerate(items):
        following = items[at + 1] if at + 1 < len(items) else None
        if is_reasoning(item) and (following is None or not is_model(following)):
            yield _for_input(
                f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
            )
        if kind_of(item) == "compaction_trigger" and following is not None:
            yield _for_input("Item of type 'compaction_trigger' must be the last item of the input.")  # words: unknown


def apart(items: Sequence[Item], reasons: Mapping[str, str]) -> Iterator[Problem]:
    seen: set[str] = set()
    for at, item in enumerate(items):
        name = str(item.get("id"))
        reason = reasons.get(name, name)
        if reason != name and reason not in seen:
            text = f"Item '{name}' of type '{kind_of(item)}' was provided without its required 'reasoning' item:"
            yield _for_input(f"{text} '{reason}'.")
        following = str(items[at + 1].get("id")) if at + 1 < len(items) else ""
        if is_reasoning(item) and reasons.get(following, name) != name:
            yield _for_input(f"Item '{name}' of type 'reasoning' was provided without its required following item.")
        seen.add(name)


def _for_input(text: str) -> Problem:
    return Problem(text, "input")


def _duplicates(items: Iterable[Item]) -> Iterator[Problem]:
    seen: set[str] = set()
    for item in items:
        name = item.get("id")
        if name is None or kind_of(item) == "local_shell_call_output":
            continue
        if name in seen:
            yield _for_input(
                f"Duplicate item found with id {name}. Remove duplicate items from your input and try again."
            )
        seen.add(name)


def _pairs(items: Sequence[Item], *, known: bool) -> Iterator[Problem]:
    # a reference may stand for any call
    references = [str(item.get("id")) for item in items if kind_of(item) == "item_reference"]
    known = known and all(name.startswith(("rs_", "msg_")) for name in references)
    open_calls: dict[tuple[str, Any], Item] = {}
    answered: set[tuple[str, Any]] = set()
    for item in items:
        kind = kind_of(item)
        if kind in CALLS:
            open_calls[kind, item.get("call_id")] = item
        elif kind in OUTPUTS:
            name = item.get("call_id") or item.get("id")
            key = (OUTPUTS[kind], name)
            if open_calls.pop(key, None) is not None:
                answered.add(key)
            elif known and key not in answered:
                words = CALLS[OUTPUTS[kind]][1]
                yield _for_input(f"No tool call found for {words} output with call_id {name}.")
    for kind, name in open_calls:
        yield _for_input(f"No tool output found for {CALLS[kind][1]} {name}.")
