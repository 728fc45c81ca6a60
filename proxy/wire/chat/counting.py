"""Tokens of messages, tools and response formats: text by the counter, media by formula, framing by constants.

Framing is what OpenAI's cookbook measured for its models; other servers' templates differ by a token or two
a message, and calibration learns that. Base64 is never counted as text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from policies.media import bare_name, is_media, part_tokens
from policies.tokens import TokenCounter
from proxy.wire.tokenizer import TextCounter

MESSAGE_OVERHEAD = 4
NAME_OVERHEAD = 1
CALL_OVERHEAD = 8
UNCOUNTED = frozenset({"weir", "cache_control", "provider_specific_fields", "annotations", "parsed"})
BLOB_CHARS = 2_048

FUNCTION_INIT, FUNCTION_INIT_OLD = 7, 10
PROPERTY_INIT, PROPERTY_KEY = 3, 3
ENUM_INIT, ENUM_ITEM = -3, 3
FUNCTION_END = 12
CLAUDE_TOOLS = 346

_BASE64 = re.compile(r"[A-Za-z0-9+/=_\-\r\n]*")
_BASE64_SAMPLE = 1_024
_OPENAI = re.compile(r"(?:chat)?gpt-(?!oss)|o[1-9](?![a-z0-9])")
_OLD = re.compile(r"gpt-(?:4(?![.\w])|3\.?5)")
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_NESTED_SCHEMAS = ("items", "additionalProperties", "not")
_NESTED_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NESTED_MAPS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Countable:
    """What something costs: ``fixed`` tokens (framing, media) and the ``texts`` that a counter adds."""

    fixed: int
    texts: tuple[str, ...] = ()

    def count(self, counter: TokenCounter) -> int:
        """All its tokens, counted here and now."""
        return max(0, self.fixed + sum(counter.count(text) for text in self.texts))


def count_message(
    message: Mapping[str, Any], counter: TokenCounter, *, model: str, image_tokens: int | None = None
) -> int:
    """Uncalibrated tokens of one chat message; never raises for anything that JSON can say."""
    return message_texts(message, model=model, image_tokens=image_tokens).count(counter)


async def count_messages(
    messages: Sequence[Mapping[str, Any]], counter: TextCounter, *, model: str, image_tokens: int | None = None
) -> list[int]:
    """Uncalibrated tokens of each message, with one trip off the event loop for all of them where it is long."""
    return await count_all([message_texts(m, model=model, image_tokens=image_tokens) for m in messages], counter)


def count_tools(tools: Any, functions: Any, response_format: Any, counter: TokenCounter, *, model: str) -> int:
    """Uncalibrated tokens of tool definitions, legacy functions and a response schema; 0 for none."""
    return tool_texts(tools, functions, response_format, model=model).count(counter)


async def count_all(items: Sequence[Countable], counter: TextCounter) -> list[int]:
    """Tokens of each item, with one :meth:`TextCounter.count_many` for the texts of all."""
    counts = iter(await counter.count_many([text for item in items for text in item.texts]))
    return [max(0, item.fixed + sum(islice(counts, len(item.texts)))) for item in items]


def message_texts(message: Any, *, model: str, image_tokens: int | None = None) -> Countable:
    """A message's framing, media and texts. Ids are not counted: no template shows them to the model."""
    fixed, texts = MESSAGE_OVERHEAD, list[str]()
    if not isinstance(message, Mapping):
        return Countable(fixed, _texts(message))
    name = message.get("name")
    if isinstance(name, str) and name:
        fixed += NAME_OVERHEAD
        texts.append(name)
    content = _content_texts(message.get("content"), model=model, image_tokens=image_tokens)
    texts += (*content.texts, *_texts(message.get("refusal")), *_reasoning_texts(message))
    calls = message.get("tool_calls")
    for call in (*(calls if isinstance(calls, list) else ()), message.get("function_call")):
        if call:
            fixed += CALL_OVERHEAD
            texts += _call_texts(call)
    audio = message.get("audio")
    if isinstance(audio, Mapping):
        said = _texts(audio.get("transcript"))
        texts += said
        fixed += 0 if said else part_tokens({"type": "audio", "audio": audio}, model=model)
    return Countable(fixed + content.fixed, tuple(texts))


def tool_texts(tools: Any, functions: Any, response_format: Any, *, model: str) -> Countable:
    """Definitions as OpenAI's models are shown them (the cookbook's constants), as JSON for every other model."""
    name = bare_name(model)
    definitions = [item for group in (tools, functions) if isinstance(group, list) for item in group]
    fixed, texts = 0, list[str]()
    if _OPENAI.match(name):
        init = FUNCTION_INIT_OLD if _OLD.match(name) else FUNCTION_INIT
        fixed = FUNCTION_END if definitions else 0
        for definition in definitions:
            function = _function_texts(definition, init)
            fixed += function.fixed
            texts += function.texts
    else:
        fixed = CLAUDE_TOOLS if definitions and "claude" in name else 0
        texts += [json_text(definition) for definition in definitions]
    schema = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if schema:
        texts.append(json_text(schema))
    return Countable(fixed, tuple(texts))


def json_text(value: Any) -> str:
    """``value`` as JSON text without marks that are not sent to a model and without base64; of any depth."""
    out: list[str] = []
    stack: list[Iterator[tuple[str, Any]]] = [iter((("", value),))]
    closing = [""]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            out.append(closing.pop())
            continue
        prefix, item = entry
        if isinstance(item, Mapping):
            out.append(prefix + "{")
            closing.append("}")
            stack.append(_members(item))
        elif isinstance(item, list | tuple):
            out.append(prefix + "[")
            closing.append("]")
            stack.append(_elements(item))
        else:
            out.append(prefix + _scalar(item))
    return "".join(out)


def is_blob(text: str) -> bool:
    """True for a ``data:`` URL or base64 of more than 2 KB, judged by its first, middle and last KB."""
    if len(text) <= BLOB_CHARS:
        return False
    if text[:5].lower() == "data:" and text.find(",", 0, BLOB_CHARS) > 0:
        return True
    middle = len(text) // 2
    samples = (text[:_BASE64_SAMPLE], text[middle : middle + _BASE64_SAMPLE], text[-_BASE64_SAMPLE:])
    return all(_BASE64.fullmatch(sample) for sample in samples)


def _content_texts(content: Any, *, model: str, image_tokens: int | None) -> Countable:
    """Text and media of a message's content; the content of an Anthropic ``tool_result`` part is content too."""
    if isinstance(content, str):
        return Countable(0, (content,) if content else ())
    fixed, texts = 0, list[str]()
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        elif not isinstance(part, Mapping):
            texts += _texts(part)
        elif is_media(part):
            fixed += part_tokens(part, model=model, image_tokens=image_tokens)
        elif part.get("type") == "tool_result":
            waiting.append(part.get("content"))
        elif part.get("type") == "tool_use":
            fixed += CALL_OVERHEAD
            texts += _call_texts(part)
        else:
            texts += _part_texts(part)
    return Countable(fixed, tuple(texts))


def _part_texts(part: Mapping[str, Any]) -> tuple[str, ...]:
    kind = part.get("type", "text")
    text = part.get(_TEXT_KEYS[kind]) if isinstance(kind, str) and kind in _TEXT_KEYS else None
    return (text,) if isinstance(text, str) else (json_text(part),)


def _reasoning_texts(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The reasoning that goes back with a message; servers that name it twice are counted once."""
    for key in ("reasoning_content", "reasoning"):
        if texts := _texts(message.get(key)):
            return texts
    details = message.get("reasoning_details")
    if not isinstance(details, list):
        return _texts(details)
    found: list[str] = []
    for detail in details:
        if isinstance(detail, Mapping):
            found += (text for key in ("text", "summary") for text in _texts(detail.get(key)))
        else:
            found += _texts(detail)
    return tuple(found)


def _call_texts(call: Any) -> tuple[str, ...]:
    if not isinstance(call, Mapping):
        return _texts(call)
    inner = next((v for key in ("function", "custom") if isinstance(v := call.get(key), Mapping)), call)
    keys = ("name", "arguments", "input")
    return tuple(text for key in keys for text in _texts(inner.get(key)))


def _function_texts(definition: Any, init: int) -> Countable:
    """One definition by the cookbook; what is not a function (a built-in or custom tool) by its JSON."""
    function = definition.get("function", definition) if isinstance(definition, Mapping) else definition
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or "format" in function:
        return Countable(init, (json_text(definition),))
    fixed, texts = init, [f"{function['name']}:{_described(function)}"]
    waiting = [function.get("parameters"), function.get("input_schema")]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties:
            fixed += PROPERTY_INIT + PROPERTY_KEY * len(properties)
            for key, value in properties.items():
                kind = value.get("type", "") if isinstance(value, Mapping) else ""
                texts.append(f"{key}:{kind if isinstance(kind, str) else json_text(kind)}:{_described(value)}")
            waiting += properties.values()
        options = schema.get("enum")
        if isinstance(options, list):
            fixed += ENUM_INIT + ENUM_ITEM * len(options)
            texts += (text for option in options for text in _texts(option))
        waiting += _nested(schema)
    return Countable(fixed, tuple(texts))


def _nested(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas inside ``schema`` other than its properties; the cookbook has none of them."""
    yield from (schema.get(key) for key in _NESTED_SCHEMAS)
    for key in _NESTED_LISTS:
        if isinstance(branches := schema.get(key), list):
            yield from branches
    for key in _NESTED_MAPS:
        if isinstance(definitions := schema.get(key), Mapping):
            yield from definitions.values()


def _described(value: Any) -> str:
    """The description without its final full stop, as the cookbook has it."""
    description = value.get("description") if isinstance(value, Mapping) else None
    return description.removesuffix(".") if isinstance(description, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    """A string as it is, anything else as JSON, nothing for what is empty."""
    if value is None or value in ("", [], {}):
        return ()
    return (value,) if isinstance(value, str) else (json_text(value),)


def _members(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    separator = ""
    for key, value in mapping.items():
        if key in UNCOUNTED or (isinstance(value, str) and is_blob(value)):
            continue
        yield f"{separator}{_scalar(key)}: ", value
        separator = ", "


def _elements(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    separator = ""
    for value in values:
        yield separator, value
        separator = ", "


def _scalar(value: Any) -> str:
    """JSON of what is neither object nor array; nothing for base64."""
    if isinstance(value, str) and is_blob(value):
        return '""'
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 10_000:
        return "9" * (value.bit_length() * 3 // 10)
    return json.dumps(value, ensure_ascii=False, default=str)
