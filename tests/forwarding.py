"""Whole conversations through the real reading and planning of a Weir, request by request, without a socket.

:class:`Forwarding` gives the body that would go up for each request. What stands in for the model that writes
summaries is a function; everything else is the product.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from policies.effects import Answers, Done, Effect, Failed, Reply, Save, StateSaved, Summarize, Summary, Together
from policies.tokens import CHARS4
from proxy.access.destination import MANAGED
from proxy.app import running
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.effects.perform import by_shingles
from proxy.errors import ContextLengthExceeded
from proxy.exchange.plan import plan_request
from proxy.exchange.read import read_request
from proxy.exchange.run import ExchangeHandler
from proxy.exchange.send import attempts_for
from proxy.planning.values import Plan
from proxy.runtime import Runtime
from proxy.store.records import AnswerRow
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import Tokenizer
from tests import violations
from tests.upstream import SimulatorSettings
from tests.upstream.chat import check_chat
from tests.upstream.delivery import summarize

TOKENIZER = Tokenizer()
Body = Mapping[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
STRICT = SimulatorSettings()


@asynccontextmanager
async def started(window: int | None) -> AsyncIterator[Runtime]:
    """A Weir with no upstream behind it."""
    flags = Flags(upstream="http://127.0.0.1:9/v1", window=window, store="sqlite+aiosqlite:///:memory:")
    config = load_config(None, env={"WEIR_AUTH_TENANT": "key"}, flags=flags)
    async with running(config, telemetry=Telemetry.create(OtelSettings()), tokenizer=TOKENIZER) as runtime:
        yield runtime


@dataclass
class Sent:
    """What goes up of a request, and how that came about."""

    body: bytes
    plan: Plan

    @property
    def value(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def acted(self) -> bool:
        return self.plan.decision is not None and self.plan.decision.is_new

    @property
    def edited(self) -> bool:
        return self.plan.decision is not None and self.plan.decision.pieces is not None


@dataclass
class Forwarding:
    """One client's requests under a policy; ``key`` sets its conversations apart from others."""

    runtime: Runtime
    policy: str = "balanced"
    key: str = "sk-test"
    summaries: bool = True
    path: str = MESSAGES
    headers: tuple[tuple[bytes, bytes], ...] = ()
    degraded: list[str] = field(default_factory=list)

    async def send(self, body: bytes) -> Sent | None:
        """What goes up for a request, None where Weir refuses it as too long for any plan."""
        name = b"x-api-key" if self.path == MESSAGES else b"authorization"
        value = self.key.encode() if self.path == MESSAGES else b"Bearer " + self.key.encode()
        headers = [(name, value), (b"x-weir-policy", self.policy.encode()), *self.headers]
        scope = {"type": "http", "path": self.path, "headers": headers, "client": ("127.0.0.1", 1), "state": {}}

        async def never(*_: object) -> Any:
            raise AssertionError("nothing is to be received or sent")

        handler = ExchangeHandler(self.runtime, scope, never, never, route=MANAGED[self.path])
        caller = handler.admit(headers)
        exchange = handler.exchange
        exchange.caller = caller
        if b'"item_reference"' in body:
            await self._record(json.loads(body)["input"], caller.tenant)
        request = await read_request(self.runtime, exchange, body, caller)
        if request.plan_request is not None:
            request.plan_request.ask = self._reply
        try:
            plan = await plan_request(self.runtime, exchange, request)
        except ContextLengthExceeded:
            return None
        sent = attempts_for(self.runtime, exchange, request).within_window(plan)
        self.degraded += plan.degraded
        if request.plan_request is not None and plan.recognized is not None:
            request.plan_request.ask_later = None
            self.runtime.preparation.after(request.plan_request, plan)
            await self.runtime.preparation.settled()
        return Sent(sent, plan)

    async def _record(self, items: Sequence[Mapping[str, Any]], tenant: str) -> None:
        """The items that a request only names are on record, as they are where the answers with them have come by."""
        for name in (str(item["id"]) for item in items if item.get("type") == "item_reference"):
            said = {"role": "assistant", "content": [{"type": "output_text", "text": f"This is {name}."}]}
            item = {"type": "reasoning", "summary": []} if name.startswith("rs") else {"type": "message", **said}
            output = json.dumps({**item, "id": name}).encode()
            row = AnswerRow(
                tenant=tenant,
                id=f"resp_{name}",
                parent=None,
                conversation="",
                at=0,
                given=b"",
                output=output,
                items=(name,),
            )
            await self.runtime.answers.keep(row, lasting=False)

    async def _reply(self, effect: Effect) -> Reply:
        match effect:
            case Summarize():
                return self._summary(effect)
            case Together():
                return Answers(tuple(map(self._summary, effect.effects)))
            case Save():
                return StateSaved(1)
        return Done() if not hasattr(effect, "pairs") else by_shingles(effect)

    def _summary(self, effect: Summarize) -> Summary | Failed:
        if not self.summaries:
            return Failed("timeout")
        return Summary(summarize(effect.prompt, limit=effect.max_tokens, count=CHARS4.count))


def problems(body: Body, path: str, *, open_server: bool = False) -> list[str]:
    """What the simulator's rules find wrong with a request."""
    if path == RESPONSES:
        return [found.message for found in violations.of_responses(body, open_server=open_server)]
    if path == CHAT:
        return [found.message for found in islice(check_chat(body, STRICT), 1)]
    return [found.message for found in violations.of_messages(body)]


def history(body: Body) -> Any:
    """The array of a request."""
    return body["input"] if "input" in body else body["messages"]


def unmarked(value: Any) -> Any:
    """The same without cache markers."""
    if isinstance(value, dict):
        return {k: unmarked(v) for k, v in value.items() if k not in ("cache_control", "prompt_cache_breakpoint")}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def markers(body: Body) -> list[str]:
    """The lifetimes of a request's cache markers, in order."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("cache_control"), dict):
                yield str(value["cache_control"].get("ttl", "5m"))
            yield from walk(value.get("content"))
        elif isinstance(value, list):
            for each in value:
                yield from walk(each)

    return [found for name in ("tools", "system", "messages") for found in walk(body.get(name))]


def sacred(body: Body) -> dict[str, Any]:
    """What nobody but the provider or the model may have written, by a name: calls, seals, signatures."""
    found: dict[str, Any] = {}
    for item in body.get("input") or () if isinstance(body.get("input"), list) else ():
        kind = item.get("type")
        if kind is not None and kind != "message" and not kind.endswith("_output"):
            name = item.get("call_id") or item.get("id")  # a call may go without its own id, under no other
            found[f"{kind} {name}"] = {k: v for k, v in item.items() if k != "id" or not item.get("call_id")}
        if item.get("id"):
            found[f"id {item['id']}"] = kind
    for message in body.get("messages") or ():
        blocks = message["content"] if isinstance(message["content"], list) else []
        for block in blocks:
            if block["type"] not in ("text", "tool_result", "image", "document"):
                name = block.get("id") or block.get("signature") or block.get("data") or block.get("tool_use_id")
                found[f"{block['type']} {name}"] = unmarked(block)
    return found


def altered(sent: Body, given: Body) -> list[str]:
    """What of a forwarded request its client did not write so."""
    known = sacred(given)
    return [name for name, value in sacred(sent).items() if known.get(name, ...) != value]


def widowed(sent: Body, given: Body) -> list[str]:
    """Items with an id that have lost the reasoning they were made with, and reasoning that is followed by another.

    The reasoning of an item is the nearest one before it with nothing of a user's or the system's between.
    """
    if not isinstance(given.get("input"), list):
        return []
    made, later = _made_with(given["input"]), _made_with(sent["input"])
    return [f"{name} was made with {made[name]}" for name, with_ in later.items() if made.get(name, with_) != with_]


def _made_with(items: Sequence[Body]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    newest: str | None = None
    for item in items:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        name = str(item.get("id") or item.get("call_id") or "")
        if kind == "reasoning" or name.startswith("rs_"):
            newest = name
        elif kind == "message" and item.get("role") != "assistant":
            newest = None
        elif item.get("id") and kind in ("message", "function_call", "custom_tool_call"):  # others need their id
            found[name] = newest
    return found


def thoughtless(sent: Body, given: Body) -> list[str]:
    """Whether the newest assistant message with calls that goes up has not all the thinking that it came with."""
    came = {name: thoughts for names, thoughts in _thoughts(given) for name in names}
    newest = next((each for each in reversed(_thoughts(sent)) if each[0]), None)
    if newest is None or came[newest[0][0]] == newest[1]:
        return []
    return [f"{len(newest[1])} thoughts in place of {len(came[newest[0][0]])}"]


def _thoughts(body: Body) -> list[tuple[list[str], list[Any]]]:
    """Of each assistant message the calls and the thinking."""
    found = []
    for message in body.get("messages") or ():
        if message["role"] == "assistant" and isinstance(message["content"], list):
            blocks = message["content"]
            thoughts = [block for block in blocks if block["type"] in ("thinking", "redacted_thinking")]
            found.append(([block["id"] for block in blocks if block["type"] == "tool_use"], thoughts))
    return found


def walls(body: Body) -> int:
    """How often a provider has summed up what stands before."""
    return len(re.findall(r'"type": ?"compaction"', json.dumps(history(body))))


def faults(sent: Sent, given: Body, before: Body | None, *, path: str) -> list[str]:
    """What is wrong with a forwarded request, where the client's own and the one forwarded before it were right."""
    value = sent.value
    found = [f"refused: {words}" for words in problems(value, path)]
    found += [f"altered: {name}" for name in altered(value, given)]
    found += [f"widowed: {words}" for words in widowed(value, given)]
    found += [f"thinking: {words}" for words in thoughtless(value, given)]
    if len(markers(value)) > len(markers(given)):
        found.append(f"{len(markers(value))} cache markers in place of {len(markers(given))}")
    if sent.plan.degraded:
        found.append(f"degraded: {sent.plan.degraded}")
    grows = [each.get("role") for each in given.get("messages", ())[-2:]] == ["user", "user"]  # a turn, in two messages
    if before is not None and not sent.acted and walls(before) == walls(value) and not grows:
        old, new = settled(history(before)), settled(history(value))
        if new[: len(old)] != old:
            found.append("does not begin with the request before")
    return found


def settled(array: Sequence[Any]) -> list[Any]:
    """The array without what changes in it from request to request: markers, which messages make one turn."""
    found: list[Any] = []
    for message in unmarked(list(array)):
        content = message.get("content") if "role" in message and "type" not in message else None
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        found += [message] if content is None else [(message["role"], block) for block in content]
    return found
