"""``POST /v1/messages``, whole and as a stream, in Anthropic's words and blocks, with what it signs and keeps."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.upstream.checks import misshapen, refuse_first
from tests.upstream.delivery import compact, summarize, text_of
from tests.upstream.memory import Sealer, ServerMemory, ServerThread, TenantMemory, owner
from tests.upstream.messages_rules import REQUEST, THINKING, Block, blocks_of, coded, form, sequence, sides
from tests.upstream.model import AdmittedRequest, Completion, Sender, SimulatorSettings, Surface
from tests.upstream.window import Dialect, Problem, PromptCounter, PromptPart, Request, canonical, tool_pieces

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "window": "model_context_window_exceeded",
}
SIGNATURE = "EqoB"
BINDING = "thinking-binding-controls-2026-08-01"
THREAD_SECONDS = 300.0
"""How long a thread is kept after its last turn."""
UNTHREADED = ("cache_control", "context_management", "fallbacks")
CLEARED = "[Old tool result content cleared]"
TRIGGER, COMPACTION_TRIGGER, KEEP = 100_000, 150_000, 3


class SimulatedMessages(Surface):
    prefix = "msg_"

    def __init__(self, settings: SimulatorSettings, counter: PromptCounter) -> None:
        super().__init__(settings, counter)
        self.sealer = Sealer(settings.seed)
        self.memory = ServerMemory(TenantMemory)
        self._serial = 0
        self._trusts = settings.foreign or not settings.strict or settings.dialect is not Dialect.ANTHROPIC

    @property
    def shape(self) -> Dialect:
        return Dialect.ANTHROPIC

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        self._judge(request)
        return self._read(request, sender)

    def counted(self, request: Request, sender: Sender) -> Mapping[str, Any]:
        self._judge(request, counting=True)
        edited = self._read(request, sender).request
        counts: dict[str, Any] = {"input_tokens": self.tokens(edited)}
        if request.get("context_management"):
            counts["context_management"] = {"original_input_tokens": self.tokens(request)}
        return counts

    def _judge(self, request: Request, *, counting: bool = False) -> None:
        settings = self.settings
        refuse_first(form(request, counting=counting) if settings.strict else misshapen(request, REQUEST))
        for name in ("model", "messages") if counting else ("model", "max_tokens", "messages"):
            if not request.get(name):
                raise Problem(f"{name}: Field required")
        asked = request.get("max_tokens")
        if settings.max_output is not None and asked is not None and asked > settings.max_output:
            text = f"max_tokens: {asked} > {settings.max_output}, which is the maximum allowed number of output tokens"
            raise Problem(f"{text} for {request['model']}")

    def _read(self, request: Request, sender: Sender) -> AdmittedRequest:
        self._serial += 1
        if not self.settings.strict:
            return AdmittedRequest(request=request, sender=sender, place={"n": self._serial})
        whole = self._continued(request, self.memory[sender.credential])
        refuse_first(sequence(whole, whole["messages"]))
        messages, dropped, place = self._verified(whole, sender)
        edited, notes = self._edited({**whole, "messages": messages})
        if BINDING in sender.beta:
            notes["input_transformations"] = dropped
        return AdmittedRequest(
            request=edited,
            sender=sender,
            notes=notes,
            compacts=bool(request.get("compaction")),
            history=tuple(whole["messages"]),
            place={**place, "by": owner(sender.credential), "n": self._serial},
        )

    def _continued(self, request: Request, tenant: TenantMemory) -> Request:
        thread = request.get("thread")
        if not thread or (self.settings.dialect is not Dialect.ANTHROPIC and not self.settings.keeps):
            return request
        named = [name for name in UNTHREADED if f'"{name}":' in json.dumps(request)]
        if named or not self.settings.keeps:
            text = "`thread` cannot be used with this request."
            raise coded(text, "thread_unsupported_request", unsupported=named)
        if thread.get("type") != "continue":
            return request
        held = tenant.threads.get(str(thread.get("previous_message_id")))
        if held is None or time.monotonic() - held.at > THREAD_SECONDS:
            text = "No usable Thread state was found for `previous_message_id`. Replay the full conversation with"
            text = f'{text} `thread: {{"type": "create"}}` to start a new Thread.'
            raise coded(text, "thread_not_found", status=404)
        if held.continued:
            text = "The response that `previous_message_id` names has already been continued."
            raise coded(text, "thread_already_continued")
        if request.get("system") is not None or request.get("tools") is not None:
            raise Problem('`system` and `tools` cannot be set when `thread.type` is "continue".')  # words: unknown
        if request["model"] != held.fields["model"]:
            raise coded("`model` differs from the Thread's.", "thread_fingerprint_mismatch")
        return {**request, **held.fields, "messages": [*held.messages, *request["messages"]]}

    def _verified(self, request: Request, sender: Sender) -> tuple[list[Request], list[Any], dict[str, Any]]:
        """The messages without thinking that is bound elsewhere, what was dropped, and what new thinking is bound to.

        Thinking is bound to tools, system prompt and all that was said before, and to the thinking before it, of
        which the first blocks may be missing; a summary that the API made frees what is older and hides all before it.
        """
        tools = [tool for tool in request.get("tools") or () if not tool.get("defer_loading")]
        before = head = _digest("", [blocks_of(request.get("system")), tools])
        last = max((at for at, one in enumerate(request["messages"]) if one["role"] == "assistant"), default=-1)
        chain, dropped, messages, since = list[str](), list[Any](), list[Request](), 0
        for index, message in enumerate(request["messages"]):
            blocks = blocks_of(message.get("content"))
            kept = list[Block]()
            for at, block in enumerate(blocks):
                path = f"messages.{index}.content.{at}"
                if block["type"] == "compaction" and block.get("content"):
                    since, before, chain = self._summary(block, since), head, []
                if block["type"] not in THINKING:
                    before = _digest(before, [message["role"], _bare(block)])
                    kept.append(block)
                    continue
                value = self._signed(block, path, sender, at if index == last else None)
                if value is not None and self._is_stale(value, before, chain, since):
                    self._check_dropping(request, sender, path)
                    dropped.append({"type": "thinking_dropped", "path": path, "reason": "prefix_binding_mismatch"})
                    continue
                chain += [value["id"]] if value is not None else []
                kept.append(block)
            if kept or not blocks:
                messages.append(message if len(kept) == len(blocks) else {**message, "content": kept})
        return messages, dropped, {"before": before, "chain": chain}

    def _is_stale(self, value: Mapping[str, Any], before: str, chain: Sequence[str], since: int) -> bool:
        if not self.settings.bound or value["n"] <= since:
            return False
        return value["before"] != before or bool(chain and value["chain"][-len(chain) :] != chain)

    def _check_dropping(self, request: Request, sender: Sender, path: str) -> None:
        binding = request["thinking"].get("block_binding") if request.get("thinking") else None
        if binding is not None and BINDING not in sender.beta:
            raise Problem(f"thinking.{request['thinking']['type']}.block_binding: Extra inputs are not permitted")
        if (binding or {}).get("prefix_mismatch_behavior") != "drop_block":
            raise Problem(
                f"{path}: Invalid `signature` in `thinking` block. The block is bound to a different conversation. "
                'Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
            )

    def _signed(self, block: Block, path: str, sender: Sender, at: int | None) -> Mapping[str, Any] | None:
        value = self.sealer.read(SIGNATURE, str(block.get("signature") or block.get("data")))
        if value is None or value.get("by") != owner(sender.credential) or "chain" not in value:
            if self._trusts:
                return None
            raise Problem(f"{path}: Invalid `signature` in `{block['type']}` block")
        if at is not None and (value["text"] != _hash(block["thinking"]) or at != value["at"]):
            raise Problem(
                f"{path}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. "
                "These blocks must remain as they were in the original response."
            )
        if value["text"] != _hash(block["thinking"]):
            raise Problem(f"{path}: Invalid `signature` in `thinking` block")
        return value

    def _summary(self, block: Block, since: int) -> int:
        sealed = block.get("signature") or block.get("encrypted_content")
        value = self.sealer.read(SIGNATURE, str(sealed))
        if value is None and self._trusts:
            return since
        if value is None:
            text = "The `compaction` block's `signature` does not verify."
            raise coded(text, "compaction_signature_invalid")
        if value["text"] != _hash(str(block["content"])):
            text = "The `compaction` block's `content` differs from the text its `signature` recorded."
            raise coded(text, "compaction_content_mismatch")
        return int(value["n"])

    def _edited(self, request: Request) -> tuple[Request, dict[str, Any]]:
        if not request.get("context_management"):
            return request, {}
        applied = []
        for edit in request["context_management"].get("edits") or ():
            kind, size = edit["type"], self.tokens(request)
            if kind == "compact_20260112":
                if size >= (edit.get("trigger") or {}).get("value", COMPACTION_TRIGGER):
                    request = {**request, "compact": edit}
                continue
            name = "cleared_thinking_turns" if kind.startswith("clear_thinking") else "cleared_tool_uses"
            clear = _without_thinking if kind.startswith("clear_thinking") else _without_results
            messages, count = clear(request["messages"], edit, size)
            cleared = size - self.tokens({**request, "messages": messages})
            if count and cleared >= (edit.get("clear_at_least") or {}).get("value", 0):
                applied.append({"type": kind, name: count, "cleared_input_tokens": cleared})
                request = {**request, "messages": messages}
        return request, {"context_management": {"applied_edits": applied}}

    def pieces(self, request: Request) -> list[PromptPart]:
        pieces = tool_pieces(request)
        if request.get("system"):
            pieces.append(PromptPart("system", request["system"]))
        messages = list(request["messages"])
        for index, message in reversed(list(enumerate(messages))):
            blocks = blocks_of(message.get("content"))
            walls = [at for at, one in enumerate(blocks) if one.get("type") == "compaction" and one.get("content")]
            if walls:
                messages = [{**message, "content": blocks[walls[-1] :]}, *messages[index + 1 :]]
                break
        said = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
        if request.get("cache_control") and said:  # stands for a marker on the last block
            said[-1]["cache_control"] = request["cache_control"]
        return [*pieces, *(PromptPart("message", message) for message in said)]

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        finish, edit = outcome.spoken.finish, outcome.request.get("compact") or {}
        paused = outcome.admitted.compacts or edit.get("pause_after_compaction")
        return {
            "id": outcome.id,
            "type": "message",
            "role": "assistant",
            "model": outcome.model,
            "content": self.blocks(outcome),
            "stop_reason": "compaction" if paused else STOP_REASONS.get(finish, finish),
            "stop_sequence": None,
            **outcome.admitted.notes,
            "usage": _usage(outcome),
        }

    def blocks(self, outcome: Completion) -> list[dict[str, Any]]:
        spoken, admitted, mark = outcome.spoken, outcome.admitted, outcome.id.removeprefix(self.prefix)
        if admitted.compacts:
            sealed = self.sealer.close(SIGNATURE, {"n": admitted.place["n"], "text": _hash(spoken.text)})
            return [{"type": "compaction", "content": spoken.text, "signature": sealed}]
        blocks: list[dict[str, Any]] = []
        edit = outcome.request.get("compact")
        if edit:
            said = "\n".join(text_of(message.get("content")) for message in outcome.request["messages"])
            text = summarize(said, limit=400, count=self.counter.count)
            sealed = self.sealer.close(SIGNATURE, {"n": admitted.place["n"], "text": _hash(text)})
            blocks.append({"type": "compaction", "content": text, "encrypted_content": sealed})
            if edit.get("pause_after_compaction"):
                return blocks
        if spoken.reasoning:
            value = {**admitted.place, "id": mark, "text": _hash(spoken.reasoning), "at": len(blocks)}
            sealed = self.sealer.close(SIGNATURE, value)
            blocks.append({"type": "thinking", "thinking": spoken.reasoning, "signature": sealed})
        if spoken.text or not spoken.calls:
            blocks.append({"type": "text", "text": spoken.text})
        for index, call in enumerate(spoken.calls):
            name = call.id or f"toolu_{mark[-16:]}{index}"
            blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": json.loads(call.arguments)})
        return blocks

    def remember(self, outcome: Completion) -> None:
        request, admitted = outcome.request, outcome.admitted
        thread, tenant = request.get("thread"), self.memory[admitted.sender.credential]
        if not thread or not self.settings.keeps:
            return
        if thread.get("type") == "continue":
            tenant.threads[thread["previous_message_id"]].continued = True
        fields = {name: request[name] for name in ("model", "system", "tools") if request.get(name) is not None}
        said = {"role": "assistant", "content": self.blocks(outcome)}
        tenant.threads[outcome.id] = ServerThread(messages=(*admitted.history, said), fields=fields)

    def error_event(self, error: bytes, sequence: int) -> bytes:
        return b"event: error\ndata: " + error + b"\n\n"

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        whole = self.body(outcome)
        return tuple(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact(event)) for event in _events(whole, outcome)
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _digest(before: str, value: Any) -> str:
    return _hash(before + canonical(value)[0].decode("utf-8", "surrogatepass"))


def _bare(block: Block) -> Block:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] != "tool_result":
        return block
    return {**{k: v for k, v in block.items() if k != "is_error" or v}, "content": blocks_of(block.get("content"))}


def _without_thinking(messages: Sequence[Request], edit: Request, _: int) -> tuple[list[Request], int]:
    keep = edit.get("keep") or {"type": "thinking_turns", "value": 1}
    if isinstance(keep, str) or keep.get("type") == "all":
        return list(messages), 0
    turns = [turn for turn in sides(messages) if turn.of(*THINKING)]
    stale = turns[: max(0, len(turns) - (keep.get("value") or 1))]
    gone = {(placed.message, placed.index) for turn in stale for placed in turn.of(*THINKING)}
    return _replaced(messages, lambda index, at, block: None if (index, at) in gone else block), len(stale)


def _without_results(messages: Sequence[Request], edit: Request, tokens: int) -> tuple[list[Request], int]:
    calls = [placed.block for turn in sides(messages) for placed in turn.of("tool_use")]
    trigger = edit.get("trigger") or {}
    if (len(calls) if trigger.get("type") == "tool_uses" else tokens) <= trigger.get("value", TRIGGER):
        return list(messages), 0
    keep = dict(edit.get("keep") or {}).get("value", KEEP)
    spared = edit.get("exclude_tools") or ()
    stale = {call["id"] for call in calls[: len(calls) - keep] if call["name"] not in spared}

    def change(_: int, __: int, block: Block) -> Block:
        if block["type"] == "tool_use" and block["id"] in stale and edit.get("clear_tool_inputs"):
            return {**block, "input": {}}
        cleared = block["type"] == "tool_result" and block["tool_use_id"] in stale
        return {**block, "content": CLEARED} if cleared else block

    return _replaced(messages, change), len(stale)


def _replaced(messages: Sequence[Request], change: Callable[[int, int, Block], Block | None]) -> list[Request]:
    found: list[Request] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        blocks = [change(index, at, block) for at, block in enumerate(blocks_of(content))]
        kept = [block for block in blocks if block is not None]
        if kept:
            found.append(message if isinstance(content, str) else {**message, "content": kept})
    return found


def _usage(outcome: Completion) -> dict[str, Any]:
    cached = outcome.cached if outcome.written else 0
    written = max(0, outcome.written - cached)
    usage: dict[str, Any] = {
        "input_tokens": outcome.prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": outcome.spoken.tokens,
        "output_tokens_details": {"thinking_tokens": outcome.spoken.thought},
        "service_tier": "standard",
    }
    if outcome.request.get("compact"):
        alone = {key: usage[key] for key in ("input_tokens", "output_tokens")}
        usage["iterations"] = [{"type": "compaction", **alone}, {"type": "message", **alone}]
    return usage


def _events(whole: Mapping[str, Any], outcome: Completion) -> Iterator[Mapping[str, Any]]:
    start = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 1}}
    edited = start.pop("context_management", None)
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(whole["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        if index == 0:
            yield {"type": "ping"}
        for delta in _block_deltas(block, outcome):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}, "usage": whole["usage"]}
    yield {"type": "message_delta", **end, **({"context_management": edited} if edited else {})}
    yield {"type": "message_stop"}


def _opened(block: Mapping[str, Any]) -> Mapping[str, Any]:
    empty: Mapping[str, Any] = {"text": "", "thinking": "", "signature": "", "input": {}}
    empty = {"content": None, "encrypted_content": None} if block["type"] == "compaction" else empty
    return {key: empty.get(key, value) for key, value in block.items()}


def _block_deltas(block: Mapping[str, Any], outcome: Completion) -> Iterator[Mapping[str, Any]]:
    if block["type"] == "text":
        for piece in outcome.spoken.pieces:
            yield {"type": "text_delta", "text": piece}
    elif block["type"] == "compaction":
        yield {**block, "type": "compaction_delta"}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        text = json.dumps(block["input"])
        yield {"type": "input_json_delta", "partial_json": text[: len(text) // 2]}
        yield {"type": "input_json_delta", "partial_json": text[len(text) // 2 :]}
