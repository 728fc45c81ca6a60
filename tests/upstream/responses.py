"""``POST /v1/responses``, whole and as a stream, with what it keeps and what it seals."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from tests.upstream.checks import TABLES, above_cap, missing, refuse_first
from tests.upstream.delivery import SimulatedCall, asked_tokens, compact, summarize, text_of
from tests.upstream.memory import Sealer, ServerMemory, StoredAnswer, TenantMemory, owner
from tests.upstream.model import AdmittedRequest, Completion, Sender, SimulatorSettings, Surface
from tests.upstream.responses_rules import (
    CALLS,
    Item,
    apart,
    form,
    is_model,
    is_reasoning,
    items_of,
    kind_of,
    not_found,
    sequence,
    shapes,
    tool_names,
)
from tests.upstream.window import (
    Dialect,
    OversizedPrompt,
    Problem,
    PromptCounter,
    PromptPart,
    Request,
    overflow_problem,
    overflows,
    tool_pieces,
)

SEALED = "gAAAAA"
ECHOED: Mapping[str, Any] = TABLES["response"]
TEXTS = frozenset({"input_text", "output_text", "refusal", "text", "summary_text", "reasoning_text"})


def as_chat(item: Item) -> dict[str, Any]:
    """An item as a chat message, equal for equal meaning: without ids, states, and the two ways to write a text."""
    kind = kind_of(item)
    if kind == "message":
        return {"role": item["role"], "content": _plain(item.get("content"))}
    if kind == "reasoning":
        return {"role": "assistant", "name": str(item.get("id")), "content": _plain(item.get("summary"))}
    if kind in CALLS:
        said = item.get("arguments") or item.get("input") or json.dumps(item.get("action") or item.get("operation"))
        call = {"id": item.get("call_id"), "function": {"name": item.get("name") or kind, "arguments": said}}
        return {"role": "assistant", "tool_calls": [call]}
    if kind.endswith("_output"):
        output = item.get("output") or item.get("tools") or item.get("result") or ""
        output = output if isinstance(output, str | list) and kind != "shell_call_output" else json.dumps(output)
        return {"role": "tool", "tool_call_id": item.get("call_id") or item.get("id"), "content": _plain(output)}
    if kind == "compaction":
        return {"role": "system", "name": str(item.get("id")), "content": item.get("text")}
    return {"role": "assistant" if is_model(item) else "system", "content": json.dumps({**item, "id": None})}


def _plain(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if all(isinstance(part, dict) and part.get("type") in TEXTS for part in content):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return [_part(part) for part in content]


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    if part.get("type") in TEXTS:
        return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
    if part.get("type") == "input_image":
        image = {"url": part.get("image_url") or part.get("file_id"), "detail": part.get("detail") or "auto"}
        return {"type": "image_url", "image_url": image}
    return part


class SimulatedResponses(Surface):
    prefix = "resp_"

    def __init__(self, settings: SimulatorSettings, counter: PromptCounter) -> None:
        super().__init__(settings, counter)
        self.sealer = Sealer(settings.seed)
        self.memory = ServerMemory(TenantMemory)
        self.is_open = settings.dialect is not Dialect.OPENAI

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        self._judge(request)
        kept = self.memory[sender.credential]
        before = self._before(request, kept)
        given = [self._known(item, kept, sender) for item in items_of(request)]
        history = (*(before or ()), *given)
        if self.settings.strict:
            refuse_first((*sequence(history, known=before is not None), *apart(history, kept.reasons)))
        compacts = bool(history) and kind_of(history[-1]) == "compaction_trigger"
        shown, notes = self._bound(request, history[:-1] if compacts else history)
        model = request.get("model") or self.settings.models[0]
        whole: dict[str, Any] = {**request, "model": model, "input": shown}
        if request.get("truncation") == "auto":
            whole["input"] = self._shortened(whole)
        place = {"before": self._places(request, history)[-1], "by": owner(sender.credential), "model": model}
        return AdmittedRequest(
            request=whole,
            sender=sender,
            notes=notes,
            compacts=compacts,
            given=items_of(request),
            history=history,
            place=place,
        )

    def _judge(self, request: Request) -> None:
        settings = self.settings
        refuse_first(form(request, open_server=self.is_open) if settings.strict else shapes(request))
        for at, item in enumerate(items_of(request)):
            if kind_of(item) == "message" and not isinstance(item.get("role"), str):
                raise missing(f"input[{at}].role")
        if not request.get("model") and not request.get("prompt"):
            raise missing("model")
        asked = asked_tokens(request)
        if settings.max_output is not None and asked is not None and asked > settings.max_output:
            raise above_cap("max_output_tokens", asked, settings.max_output, "output")

    def _before(self, request: Request, kept: TenantMemory) -> Sequence[Item] | None:
        chain, conversation = request.get("previous_response_id"), request.get("conversation")
        if not self.settings.keeps:  # vLLM takes the field and reads nothing of it
            return None if chain else ()
        if chain:
            answer = kept.answers.get(chain)
            if answer is None and not self.settings.foreign:
                text = f"Previous response with id '{chain}' not found."
                raise Problem(text, "previous_response_id", "previous_response_not_found")
            return answer.items if answer is not None else None
        if conversation:
            name = conversation if isinstance(conversation, str) else conversation.get("id")
            if name not in kept.conversations and not self.settings.foreign:
                raise Problem(status=404, message=f"Conversation with id '{name}' not found.")
            return kept.conversations.get(str(name))
        return ()

    def _known(self, item: Item, kept: TenantMemory, sender: Sender) -> Item:
        kind, name, sealed = kind_of(item), item.get("id"), item.get("encrypted_content")
        refuses = self.settings.strict and not self.settings.foreign and not self.is_open
        if kind not in {"item_reference", "reasoning", "compaction", "compaction_summary"}:
            return item
        if not sealed:
            if name not in kept.items and refuses:
                raise not_found(name)
            return kept.items.get(str(name), item)
        value = self.sealer.read(SEALED, sealed)
        if value is None or value["by"] != owner(sender.credential):
            if refuses:
                raise _unverified(sealed, "Encrypted content could not be decrypted or parsed.")
            return item
        if name is not None and value["id"] != name:
            raise _unverified(sealed, "Encrypted content item_id did not match the target item id.")
        if kind == "reasoning":
            return {**item, "id": value["id"], "summary": [{"type": "summary_text", "text": value["text"]}]}
        return {**item, "id": value["id"], "text": value["text"]}

    def _places(self, request: Request, items: Sequence[Item]) -> list[str]:
        """What stands before each item, and behind them all, as digests that a change of any of it changes.

        Of what stands before a compaction they say nothing.
        """
        form = (request.get("text") or {}).get("format")
        head = [PromptPart("tools", value) for value in (request.get("tools"), form) if value]
        measured = self.counter.measure([*head, *(PromptPart("message", as_chat(item)) for item in items)])
        start = digest = b"".join(measured.digests[: len(head)])
        places = list[str]()
        for item, one in zip(items, measured.digests[len(head) :], strict=True):
            digest = start if kind_of(item) == "compaction" else digest
            places.append(digest.hex())
            digest = blake2b(digest + one, digest_size=12).digest()
        return [*places, digest.hex()]

    def _bound(self, request: Request, items: Sequence[Item]) -> tuple[list[Item], Mapping[str, Any]]:
        if not self.settings.bound:
            return list(items), {}
        stale = []
        for item, place in zip(items, self._places(request, items), strict=False):
            value = self.sealer.read(SEALED, str(item.get("encrypted_content"))) if is_reasoning(item) else None
            if value is not None and value["before"] != place:
                stale.append(item["id"])
        told = [{"id": name, "type": "reasoning", "action": "removed", "reason": "prefix_mismatch"} for name in stale]
        return [item for item in items if item.get("id") not in stale], {"input_transformations": told}

    def _shortened(self, request: Request) -> list[Item]:
        items, window = list(request["input"]), self.settings.window_of(str(request["model"]))
        while len(items) > 1:
            measured = self.counter.measure(self.pieces({**request, "input": items}))
            if not overflows(measured, window=window, asked=asked_tokens(request)):
                break
            run = 1
            while run < len(items) and is_model(items[run - 1]) and is_model(items[run]):
                run += 1
            gone = {item.get("call_id") for item in items[:run]} - {None}
            items = [item for item in items[run:] if item.get("call_id") not in gone]
        return items

    def counted(self, request: Request, sender: Sender) -> Mapping[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": self.tokens(self.admit(request, sender).request)}

    def view(self, request: Request) -> Request:
        messages: list[dict[str, Any]] = []
        if request.get("instructions"):
            messages.append({"role": "system", "content": request["instructions"]})
        for item in items_of(request):
            said = as_chat(item)
            if is_reasoning(item):
                said["content"] = ""
            if messages and is_model(item) and messages[-1]["role"] == "assistant":
                joined = [text for text in (messages[-1].get("content"), said.get("content")) if text]
                calls = [*messages[-1].get("tool_calls", ()), *said.get("tool_calls", ())]
                messages[-1] = {"role": "assistant", "content": "\n".join(map(text_of, joined)), "tool_calls": calls}
            else:
                messages.append(said)
        form = (request.get("text") or {}).get("format") or {}
        schema = {"type": form.get("type"), "json_schema": form} if form else None
        return {**request, "messages": messages, "response_format": schema}

    def pieces(self, request: Request) -> list[PromptPart]:
        """Tools, the schema, instructions, items; of what stands before a compaction only what others said."""
        form = (request.get("text") or {}).get("format")
        pieces = tool_pieces({"tools": request.get("tools"), "response_format": {"json_schema": form}})
        if request.get("instructions"):
            pieces.append(PromptPart("system", request["instructions"]))
        items = items_of(request)
        wall = max((at for at, item in enumerate(items) if kind_of(item) == "compaction"), default=0)
        shown = [
            item for at, item in enumerate(items) if at >= wall or (kind_of(item) == "message" and not is_model(item))
        ]
        return [*pieces, *(PromptPart("message", as_chat(item)) for item in shown)]

    def too_long(self, overflow: OversizedPrompt, dialect: Dialect, *, numbers: bool) -> Problem:
        """OpenAI says it without a number."""
        if dialect is not Dialect.OPENAI:
            return overflow_problem(overflow, dialect)
        text = "Your input exceeds the context window of this model. Please adjust your input and try again."
        text = overflow_problem(overflow, dialect).message if numbers else text
        return Problem(message=text, param="input", code="context_length_exceeded")

    def output(self, outcome: Completion) -> list[dict[str, Any]]:
        spoken, admitted, mark = outcome.spoken, outcome.admitted, outcome.id.removeprefix(self.prefix)
        if admitted.compacts:
            return [self._sealed("compaction", f"cmp_{mark}", spoken.text, admitted)]
        items: list[dict[str, Any]] = []
        asked = (edit.get("compact_threshold") for edit in outcome.request.get("context_management") or ())
        if spoken.text and any(size and outcome.prompt >= size for size in asked):  # not on turns of calls alone
            said = "\n".join(text_of(as_chat(item).get("content")) for item in items_of(outcome.request))
            text = summarize(said, limit=400, count=self.counter.count)
            items.append(self._sealed("compaction", f"cmp_{mark}", text, admitted))
            there = [{**items[0], "text": text}]
            admitted = replace(admitted, place={**admitted.place, "before": self._places(outcome.request, there)[-1]})
        if spoken.reasoning:
            items.append(self._sealed("reasoning", f"rs_{mark}", spoken.reasoning, admitted))
        if spoken.text or not spoken.calls:
            part = {"type": "output_text", "text": spoken.text, "annotations": [], "logprobs": []}
            phase = "commentary" if spoken.calls else "final_answer"
            head = {"type": "message", "id": f"msg_{mark}", "role": "assistant", "status": "completed"}
            items.append({**head, "phase": phase, "content": [part]})
        items += [_call(outcome.request, call, mark, at) for at, call in enumerate(spoken.calls)]
        if spoken.finish == "length" and items:
            items[-1]["status"] = "incomplete"
        return items

    def _sealed(self, kind: str, name: str, text: str, admitted: AdmittedRequest) -> dict[str, Any]:
        sealed = self.sealer.close(SEALED, {**admitted.place, "id": name, "text": text})
        if kind == "compaction":
            return {"type": kind, "id": name, "encrypted_content": sealed}
        if self.is_open:
            part = {"type": "reasoning_text", "text": text}
            return {"type": kind, "id": name, "summary": [], "content": [part], "status": "completed"}
        part = {"type": "summary_text", "text": text}
        return {"type": kind, "id": name, "summary": [part], "encrypted_content": sealed}

    def remember(self, outcome: Completion) -> None:
        admitted, items = outcome.admitted, self.output(outcome)
        request, kept = admitted.request, self.memory[admitted.sender.credential]
        reason = next((at for at, item in enumerate(items) if is_reasoning(item)), len(items))
        kept.reasons.update({item["id"]: items[reason]["id"] for item in items[reason:]})
        if not self.settings.keeps or request.get("store") is False:
            return
        kept.items.update((item["id"], item) for item in items)
        whole = (*admitted.history, *items)
        kept.store(outcome.id, StoredAnswer(body=self.body(outcome), given=admitted.given, items=whole))
        conversation = request.get("conversation")
        if conversation:
            name = conversation if isinstance(conversation, str) else conversation["id"]
            kept.conversations[name] = list(whole)

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        request, finish = outcome.request, outcome.spoken.finish
        reason = {**dict.fromkeys(("length", "window"), "max_output_tokens"), "content_filter": finish}.get(finish)
        items = self.output(outcome)
        if "reasoning.encrypted_content" not in (request.get("include") or ()):
            items = [{k: v for k, v in i.items() if k != "encrypted_content" or not is_reasoning(i)} for i in items]
        conversation = request.get("conversation")
        return {
            **_shell(outcome.id, outcome.model, outcome.created),
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            **{name: value if request.get(name) is None else request[name] for name, value in ECHOED.items()},
            "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
            "output": items,
            "usage": _usage(outcome),
            **outcome.admitted.notes,
        }

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        return tuple(_event(at, event) for at, event in enumerate(_events(self.body(outcome), outcome)))

    def error_event(self, error: bytes, sequence: int) -> bytes:
        return _event(sequence, {"type": "error", **_fields(error)})

    def told(self, error: bytes, how: str) -> tuple[bytes, ...]:
        begun = _shell("resp_refused", "", int(time.time()))
        opening = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        fields = _fields(error)
        failed = {**begun, "status": "failed", "error": {"code": fields["code"], "message": fields["message"]}}
        end = {"type": "response.failed", "response": failed} if how == "failed" else {"type": "error", **fields}
        return tuple(_event(at, event) for at, event in enumerate([*opening, end]))


class SimulatedCompaction(SimulatedResponses):
    def __init__(self, responses: SimulatedResponses) -> None:
        super().__init__(responses.settings, responses.counter)
        self.memory = responses.memory

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        return replace(super().admit(request, sender), compacts=True)

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        said = [item for item in outcome.admitted.history if item.get("role") == "user"]
        head = {"id": outcome.id, "object": "response.compaction", "created_at": outcome.created}
        return {**head, "output": [*map(_as_sent, said), *self.output(outcome)], "usage": _usage(outcome)}


def _as_sent(item: Item) -> Item:
    content = item["content"]
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"status": "completed", **item, "type": "message", "content": parts}


def _unverified(sealed: str, reason: str) -> Problem:
    text = f"The encrypted content {sealed[:8]}... could not be verified. Reason: {reason}"
    return Problem(text, "input", "invalid_encrypted_content")


def _call(request: Request, call: SimulatedCall, mark: str, at: int) -> dict[str, Any]:
    items = [item for item in items_of(request) if kind_of(item) == "additional_tools"]
    declared = [tool for each in (request, *items) for tool in each.get("tools") or ()]
    tool: Item = next((tool for tool in declared if call.name in tool_names(tool)), {})
    name = {"call_id": call.id or f"call_{mark}{at}", "name": call.name, "status": "completed"}
    if tool.get("type") == "namespace":
        name["namespace"] = tool["name"]
        tool = next(member for member in tool["tools"] if member.get("name") == call.name)
    if tool.get("type") == "custom":
        return {"type": "custom_tool_call", "id": f"ctc_{mark}{at}", **name, "input": call.arguments}
    return {"type": "function_call", "id": f"fc_{mark}{at}", **name, "arguments": call.arguments}


def _shell(name: str, model: str, created: int) -> dict[str, Any]:
    begun = {"id": name, "object": "response", "created_at": created, "model": model, "status": "in_progress"}
    empty: dict[str, Any] = {"background": False, "error": None, "incomplete_details": None, "usage": None}
    return {**begun, **empty, "output": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def _usage(outcome: Completion) -> Mapping[str, Any]:
    written = max(0, outcome.written - outcome.cached) if outcome.written else 0
    return {
        "input_tokens": outcome.prompt,
        "input_tokens_details": {"cached_tokens": outcome.cached, "cache_write_tokens": written},
        "output_tokens": outcome.spoken.tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.spoken.thought},
        "total_tokens": outcome.prompt + outcome.spoken.tokens,
    }


def _fields(error: bytes) -> dict[str, Any]:
    told = json.loads(error)
    told = told.get("error", told) if isinstance(told, dict) else told
    told = told if isinstance(told, dict) else {"message": str(told)}
    return {name: told.get(name) for name in ("code", "message", "param")}


def _event(at: int, event: Mapping[str, Any]) -> bytes:
    numbered = {"type": event["type"], "sequence_number": at, **event}
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact(numbered))


def _events(whole: Mapping[str, Any], outcome: Completion) -> Iterator[Mapping[str, Any]]:
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        opened = {key: [] if key in {"content", "summary"} else value for key, value in item.items()}
        opened |= {key: "" for key in ("arguments", "input") if key in item}
        opened |= {"status": "in_progress"} if "status" in item else {}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        for event in _item_events(item, outcome.spoken.pieces):
            yield {"item_id": item["id"], "output_index": index, **event}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_events(item: Mapping[str, Any], pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
    match item["type"]:
        case "reasoning" if item.get("content"):
            yield from _texts("reasoning_text", item["content"][0]["text"], {"content_index": 0})
        case "reasoning":
            part, at = item["summary"][0], {"summary_index": 0}
            yield {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}}
            yield from _texts("reasoning_summary_text", part["text"], at)
            yield {"type": "response.reasoning_summary_part.done", **at, "part": part}
        case "message":
            part, at = item["content"][0], {"content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            for piece in pieces:
                yield {"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        case "function_call":
            yield from _texts("function_call_arguments", item["arguments"], {}, "arguments")
        case "custom_tool_call":
            yield from _texts("custom_tool_call_input", item["input"], {}, "input")


def _texts(kind: str, text: str, at: Mapping[str, Any], name: str = "text") -> Iterator[dict[str, Any]]:
    middle = len(text) // 2
    for delta in (text[:middle], text[middle:]):
        if delta:
            yield {"type": f"response.{kind}.delta", **at, "delta": delta}
    yield {"type": f"response.{kind}.done", **at, name: text}
