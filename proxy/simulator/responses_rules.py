"""What ``POST /v1/responses`` refuses, in OpenAI's words: functions of the request alone.

:func:`violations` says all that is wrong. What takes the server's memory (stored items, sealed reasoning, chains) is
judged by the endpoint, which hands :func:`sequence` the items as they stand once references are resolved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from proxy.simulator.checks import MAX_TOOLS, check_shapes, keys_of, missing, not_one_of, reject, unknown
from proxy.simulator.window import Problem, Rejected, Request

Item = Mapping[str, Any]

FIELDS = keys_of("""
request: | access_programs background background_options client_metadata context_management conversation image \
include input instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls personality \
previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier \
service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user
""")["request"].known - {"type"}
"""What a request may say, of openai 3.54's ``response_create_params`` and of what Codex adds."""

ITEMS = keys_of("""
message: role content | id status phase internal_chat_message_metadata_passthrough
reasoning: summary | id content encrypted_content status
function_call: arguments call_id name | async caller id namespace status
function_call_output: output | call_id caller id name namespace status
custom_tool_call: call_id input name | async caller id namespace status
custom_tool_call_output: call_id output | caller id name status
local_shell_call: action call_id id status |
local_shell_call_output: id output | status
shell_call: action call_id | caller environment id status
shell_call_output: call_id output | caller id max_output_length status
apply_patch_call: call_id operation status | caller id
apply_patch_call_output: call_id status | caller id output
computer_call: call_id id pending_safety_checks status | action actions
computer_call_output: call_id output | acknowledged_safety_checks id status
tool_search_call: arguments | call_id execution id status
tool_search_output: tools | call_id execution id status
web_search_call: id | action status
file_search_call: id queries status | results
code_interpreter_call: id container_id | code outputs status
image_generation_call: id result status | action background error output_format quality revised_prompt size svg_usage
mcp_list_tools: id server_label tools | error
mcp_call: id arguments name server_label | approval_request_id error output status
mcp_approval_request: id arguments name server_label |
mcp_approval_response: approval_request_id approve | id reason
program: call_id code fingerprint id |
program_output: call_id id result status |
item_reference: id |
compaction compaction_summary: encrypted_content | id created_by
compaction_trigger: | id
additional_tools: role tools | id
configuration_update: | id reasoning text
""")
PARTS = keys_of("""
input_text: text | prompt_cache_breakpoint
input_image: | detail file_id image_url prompt_cache_breakpoint
input_file: | detail file_data file_id file_url filename prompt_cache_breakpoint
input_audio: input_audio | prompt_cache_breakpoint
output_text: text | annotations logprobs
refusal: refusal |
summary_text: text |
reasoning_text: text |
""")
TOOLS = keys_of("""
function: name | parameters strict allowed_callers async defer_loading description output_schema
custom: name | allowed_callers async defer_loading description format
namespace: name tools | description
mcp: server_label | allowed_callers allowed_tools authorization connector_id defer_loading headers require_approval \
server_description server_url tunnel_id
file_search: vector_store_ids | filters max_num_results ranking_options
code_interpreter: container | allowed_callers
computer: |
computer_use_preview: display_height display_width environment |
web_search web_search_2025_08_26: | external_web_access filters search_context_size user_location
web_search_preview web_search_preview_2025_03_11: | search_content_types search_context_size user_location
image_generation: | action background complexity frame_count frame_duration_ms input_fidelity input_image_mask model \
moderation output_compression output_format partial_images quality size svg
local_shell programmatic_tool_calling: |
shell: | allowed_callers environment
apply_patch: | allowed_callers
tool_search: | description execution parameters
""")
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
HOSTED = keys_of("""
web_search_call file_search_call code_interpreter_call image_generation_call mcp_list_tools mcp_call \
mcp_approval_request tool_search_call:
""")
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "compaction": "cmp"}
MAX_ID = 64
LEAST_OUTPUT = 16

REQUEST = {
    "model": str,
    "input": (str, [{}]),
    "instructions": str,
    "tools": [{"type": str, "name": str, "tools": [{"type": str, "name": str}]}],
    "tool_choice": (str, {"type": str, "name": str}),
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
    "summary": [PART],
}
STRINGS = {"function_call": "arguments", "mcp_call": "arguments", "custom_tool_call": "input"}


def violations(body: Request, *, open_server: bool = False) -> list[Problem]:
    """All that OpenAI would refuse in a request, as far as the request itself shows it; empty for a legal one.

    ``open_server`` judges as vLLM and llama.cpp do, which take more fields and reasoning in plain words.
    """
    found = list(form(body, open_server=open_server))
    if found:
        return found
    chained = body.get("previous_response_id") or body.get("conversation")
    items = items_of(body)
    return [*_unstored(body, items), *sequence(items, known=not chained)]


def items_of(body: Request) -> list[Item]:
    """The items of ``input``; a string is one message of the user's."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given or ())


def kind_of(item: Item) -> str:
    """The type of an item; messages and references may leave it out."""
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def is_model(item: Item) -> bool:
    """Whether the model wrote it."""
    kind = kind_of(item)
    if kind == "message":
        return item.get("role") == "assistant"
    return kind in CALLS or kind in HOSTED or kind in {"reasoning", "item_reference"}


def is_reasoning(item: Item) -> bool:
    """Whether it is reasoning, or a reference that is by its prefix."""
    return kind_of(item) == "reasoning" or (kind_of(item) == "item_reference" and str(item.get("id"))[:3] == "rs_")


def form(body: Request, *, open_server: bool = False) -> Iterator[Problem]:
    """What is wrong with single values: types, names, ids, parts, tools."""
    try:
        check_shapes(body, REQUEST)
        for at, item in enumerate(items_of(body)):
            check_shapes(item, ITEM, f"input[{at}].")
    except Rejected as rejected:
        yield rejected.problem
        return
    if not open_server:
        yield from (unknown(name).problem for name in body if name not in FIELDS)
    yield from _envelope(body)
    for at, item in enumerate(items_of(body)):
        yield from _item(item, f"input[{at}]", open_server=open_server)
    yield from _tools(body)


def _envelope(body: Request) -> Iterator[Problem]:
    if not body.get("model") and not body.get("prompt"):
        yield missing("model").problem
    named = [name for name in ("input", "previous_response_id", "prompt", "conversation") if body.get(name)]
    if not named:
        text = "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation_id' must be provided."
        yield reject(text, "input", "missing_required_parameter").problem
    if body.get("previous_response_id") and body.get("conversation"):
        text = "Mutually exclusive parameters. Ensure you are only providing one of: 'previous_response_id' or"
        yield reject(f"{text} 'conversation'.", "previous_response_id", "mutually_exclusive_parameters").problem
    if body.get("stream_options") is not None and not body.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        yield reject(text, "stream_options").problem
    asked = body.get("max_output_tokens")
    if asked is not None and asked < LEAST_OUTPUT:
        text = f"Invalid 'max_output_tokens': integer below minimum value. Expected a value >= {LEAST_OUTPUT}, but got"
        yield reject(f"{text} {asked} instead.", "max_output_tokens", "integer_below_min_value").problem
    if body.get("truncation") not in (None, "auto", "disabled"):
        yield not_one_of(("auto", "disabled"), body["truncation"], "truncation").problem


def _item(item: Item, path: str, *, open_server: bool) -> Iterator[Problem]:
    kind = kind_of(item)
    keys = ITEMS.get(kind)
    if keys is None:
        yield not_one_of(sorted(ITEMS), kind, f"{path}.type").problem
        return
    yield from (unknown(f"{path}.{name}").problem for name in item if name not in keys.known)
    yield from (missing(f"{path}.{name}").problem for name in keys.needed if name not in item)
    yield from _ids(item, kind, path)
    text = item.get(STRINGS.get(kind, ""), "")
    if not isinstance(text, str):
        yield reject(
            f"Invalid type for '{path}.{STRINGS[kind]}': expected a string.", f"{path}.{STRINGS[kind]}", "invalid_type"
        ).problem
    if kind == "reasoning":
        yield from _parts(item.get("summary"), f"{path}.summary", ("summary_text",))
        if item.get("content") and not open_server:
            text = (
                f"Invalid '{path}.content': array too long. Expected an array with maximum length 0, but got an array"
            )
            text = f"{text} with length {len(item['content'])} instead."
            yield reject(text, f"{path}.content", "array_above_max_length").problem
    elif kind == "message" and item.get("role") not in ROLES:
        yield not_one_of(ROLES, item.get("role"), f"{path}.role").problem
    elif kind == "message":
        allowed = ("output_text", "refusal") if item["role"] == "assistant" else INPUT_PARTS
        if item.get("content") is None:
            yield reject(
                f"Invalid type for '{path}.content': expected one of an array of objects or a string, but got "
                "null instead.",
                f"{path}.content",
                "invalid_type",
            ).problem
        yield from _parts(item.get("content"), f"{path}.content", allowed)
    elif kind in {"function_call_output", "custom_tool_call_output"}:
        yield from _parts(item.get("output"), f"{path}.output", INPUT_PARTS[:3])


def _parts(content: Any, path: str, allowed: Sequence[str]) -> Iterator[Problem]:
    if not isinstance(content, list):
        return
    for at, part in enumerate(content):
        kind, where = part.get("type"), f"{path}[{at}]"
        if kind not in allowed:
            yield not_one_of(allowed, kind, f"{where}.type").problem
            continue
        yield from (unknown(f"{where}.{name}").problem for name in part if name not in PARTS[kind].known)
        yield from (missing(f"{where}.{name}").problem for name in PARTS[kind].needed if part.get(name) is None)


def _ids(item: Item, kind: str, path: str) -> Iterator[Problem]:
    for name in ("id", "call_id"):
        value = item.get(name)
        if value is not None and len(value) > MAX_ID:
            text = f"Invalid '{path}.{name}': string too long. Expected a string with maximum length {MAX_ID}, but got"
            text = f"{text} a string with length {len(value)} instead."
            yield reject(text, f"{path}.{name}", "string_above_max_length").problem
    given, prefix = item.get("id"), PREFIXES.get(kind)
    if given is not None and prefix is not None and not given.startswith(prefix):
        text = f"Invalid '{path}.id': '{given}'. Expected an ID that begins with '{prefix}'."
        yield reject(text, f"{path}.id", "invalid_value").problem


def _tools(body: Request) -> Iterator[Problem]:
    tools = body.get("tools") or []
    if len(tools) > MAX_TOOLS:
        text = f"Invalid 'tools': array too long. Expected an array with maximum length {MAX_TOOLS}, but got an array"
        yield reject(f"{text} with length {len(tools)} instead.", "tools", "array_above_max_length").problem
    for at, tool in enumerate(tools):
        yield from _tool(tool, f"tools[{at}]", TOOLS)
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in {"none", "auto", "required"}:
        yield not_one_of(("none", "auto", "required"), choice, "tool_choice").problem
    elif choice == "required" and not tools:
        text = "Tool choice 'required' must be specified with 'tools' parameter."
        yield reject(text, "tool_choice").problem
    elif isinstance(choice, dict):
        wanted = [choice] if choice.get("type") != "allowed_tools" else choice.get("tools") or []
        there = {name for tool in tools for name in tool_names(tool)} | {tool.get("type") for tool in tools}
        for name in (one.get("name") or one.get("type") for one in wanted):
            if name not in there:
                yield reject(f"Tool choice '{name}' not found in 'tools' parameter.", "tool_choice").problem


def _tool(tool: Item, path: str, kinds: Mapping[str, Any]) -> Iterator[Problem]:
    kind = str(tool.get("type"))
    if kind not in kinds:
        yield not_one_of(sorted(kinds), tool.get("type"), f"{path}.type").problem
        return
    yield from (missing(f"{path}.{name}").problem for name in kinds[kind].needed if not tool.get(name))
    yield from (unknown(f"{path}.{name}").problem for name in tool if name not in kinds[kind].known)
    if kind == "namespace":
        inner = {name: TOOLS[name] for name in ("function", "custom")}
        for at, member in enumerate(tool.get("tools") or ()):
            yield from _tool(member, f"{path}.tools[{at}]", inner)


def tool_names(tool: Item) -> Iterator[str]:
    """The names under which the model may call a tool."""
    members = tool.get("tools") or () if tool.get("type") == "namespace" else (tool,)
    return (str(member["name"]) for member in members if member.get("name"))


def not_found(name: object) -> Problem:
    """An item that is not stored."""
    text = (
        f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. Try again with `store`"
        " set to true, or remove this item from your input."
    )
    return Problem(message=text, status=404, param="input")


def _unstored(body: Request, items: Iterable[Item]) -> Iterator[Problem]:
    """With ``store: false`` and no chain, what only a store could know."""
    if body.get("store") is not False:
        return
    for item in items:
        bare = kind_of(item) == "reasoning" and not item.get("encrypted_content") and not item.get("content")
        if bare or kind_of(item) == "item_reference":
            yield not_found(item.get("id"))


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


def _for_input(text: str) -> Problem:
    return reject(text, "input").problem


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
    """Every call with its output behind it, every output with its call before it, by id and type."""
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
