"""The MCP server at ``/weir/mcp``: for a client with tools of its own, the way back to what Weir
removed.

Two tools over streamable HTTP: ``recall(query)`` searches, ``read(ref, cursor)`` gives one text in
full. The key is the one that the client sends to /v1: a caller reads what was removed from its own
conversations and nothing else. With the header ``x-weir-conversation`` only that conversation is
searched. Without it all of the key's are: a client that speaks MCP does not say which conversation
it calls for. Then what is found in the one that was used last comes first.

No session is kept, so any replica answers any request.
"""

import asyncio
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from policies.limits import RECALL_TOKENS
from policies.tokens import TokenCounter
from proxy.access.admission import (
    credentials_in,
    identify,
    presented,
    refuse_foreign_pages,
    same_secret,
)
from proxy.access.destination import Caller
from proxy.errors import Forbidden, MethodNotAllowed, ProxyError
from proxy.features.recall.archive import (
    UNKNOWN,
    Past,
    RecallAnswer,
    SearchResult,
    covered_by,
    format_found,
    format_page,
    format_problem,
    past_of,
    rank,
    terms_of,
)
from proxy.features.recall.tool import RecallCall, call_of
from proxy.http.request import as_error
from proxy.runtime import Runtime
from proxy.store.records import ConversationRow, Original, StoreError
from proxy.stream import Receive, Send

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

RECALL = (
    "Searches what was removed from this conversation to keep it inside the context window: file"
    " contents, tool results, earlier messages. Use it before reading or running something again."
    " Gives passages, each with a ref."
)
READ = (
    "Reads one text that was removed from this conversation, in full, by the ref that a placeholder"
    " or recall gave."
)
INSTRUCTIONS = (
    "Weir keeps this conversation inside the model's context window. Where a message says that"
    " content was removed, recall finds it by words and read brings it back by its ref."
)
STORES_NOTHING = (
    "[recall: this server is configured to store no texts (store.content), so there is nothing to"
    " search.]"
)
UNAVAILABLE = (
    "[recall: the archive cannot be read now. Go on with what is known, or try again later.]"
)
NAME = b"x-weir-conversation"
MAX_BODY = 256 * 1024
MAX_HITS = 50
MAX_CONVERSATIONS = 20
"""How many of a key's most recently used conversations are looked up by name."""

Scope = MutableMapping[str, Any]


class McpServer:
    """The ASGI application of the route."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; ``mcp`` is loaded with the first one, since it takes a second and 25
        MB.
        """
        try:
            caller = self._caller(scope)
            if scope["method"] != "POST":
                text = (
                    "This MCP server keeps no session and sends nothing unasked: only POST is"
                    " answered here."
                )
                raise MethodNotAllowed(text, allowed=("POST",))
        except ProxyError as error:
            await as_error(error)(scope, receive, send)
            return
        make = partial(_manager, RemovedTexts(self._runtime, caller, _named(scope)))
        manager = await asyncio.to_thread(make)
        async with manager.run():
            await manager.handle_request(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        headers = credentials_in(scope["headers"])
        credential = presented(headers)
        refuse_foreign_pages(scope, self._runtime.config, has_key=bool(credential))
        token = self._runtime.config.admin_token
        if token is not None and same_secret(credential, token.get_secret_value()):
            raise Forbidden(
                "The admin token reads no originals: send the key of the caller that sent them."
            )
        return identify(scope, self._runtime.keyring, self._runtime.auth_throttle)


def _named(scope: Scope) -> str | None:
    name = dict(scope["headers"]).get(NAME, b"").decode("latin-1").strip()
    return name or None


def _manager(removed: "RemovedTexts") -> "StreamableHTTPSessionManager":
    import mcp.types as types  # noqa: PLC0415
    from mcp.server.lowlevel import Server  # noqa: PLC0415
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager  # noqa: PLC0415

    logging.getLogger("mcp").setLevel(logging.ERROR)
    tools = [
        types.Tool(
            name=name,
            description=description,
            input_schema={"type": "object", "properties": properties, "required": required},
            annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False),
        )
        for name, description, properties, required in DEFINITIONS
    ]

    async def list_tools(_: object, __: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: object, params: types.CallToolRequestParams) -> types.CallToolResult:
        text, is_error = await removed.answer(params.name, params.arguments or {})
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)], is_error=is_error
        )

    server = Server(
        "weir",
        version=version("weir-proxy"),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    return StreamableHTTPSessionManager(
        server, stateless=True, json_response=True, max_request_body_size=MAX_BODY
    )


DEFINITIONS: Sequence[tuple[str, str, Mapping[str, Any], Sequence[str]]] = (
    (
        "recall",
        RECALL,
        {"query": {"type": "string", "description": "words or identifiers"}},
        ("query",),
    ),
    (
        "read",
        READ,
        {
            "ref": {"type": "string", "description": "12 hexadecimal digits"},
            "cursor": {
                "type": "integer",
                "description": "the byte to go on from, 0 for the beginning",
            },
        },
        ("ref",),
    ),
)


class RemovedTexts(msgspec.Struct, frozen=True):
    """What was removed from one caller's conversations; with a ``name`` from that one only."""

    runtime: Runtime
    caller: Caller
    name: str | None = None

    async def answer(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The text for the model, and whether it is an error."""
        runtime = self.runtime
        counter = runtime.tokenizer.counter("o200k_base")
        call = call_of(arguments)
        if tool not in ("recall", "read"):
            return f"[recall: there is no tool {tool[:64]!r}: there are recall and read.]", True
        if (tool == "recall" and not call.query) or (tool == "read" and not call.ref):
            problem = "Give query." if tool == "recall" else "Give ref."
            return format_problem(problem, counter).text, True
        if not runtime.store.keeps_content:
            return STORES_NOTHING, False
        try:
            if not runtime.write_queue.failing:
                # what was removed a moment ago can be found
                await runtime.write_queue.flush()
            answer = await (self._recall if tool == "recall" else self._read)(call, counter)
        except StoreError:
            return UNAVAILABLE, True
        return answer.text, False

    async def _recall(self, call: RecallCall, counter: TokenCounter) -> RecallAnswer:
        store = self.runtime.store
        tenant = self.caller.tenant
        within = None
        if self.name is not None:
            within = await store.conversation(tenant, self.name)
            if within is None:
                return _answer(f"[recall: there is no conversation {self.name[:80]!r}.]", counter)
        rows = await store.search(
            tenant, call.query, limit=MAX_HITS, conversation=None if within is None else within.id
        )
        found = [past_of(row) for row in rows] if within is not None else await self._placed(rows)
        terms = terms_of(call.query)
        hits = await asyncio.to_thread(rank, terms, [past.text for past in found])
        hits = sorted(hits, key=lambda hit: found[hit.index].conversation != found[-1].conversation)
        result = SearchResult(tuple(found), tuple(hits), terms)
        return await asyncio.to_thread(format_found, result, room=RECALL_TOKENS, counter=counter)

    async def _placed(self, rows: Sequence[Original]) -> list[Past]:
        """The texts with their conversations, those of the conversation that was used last at the
        end.
        """
        store = self.runtime.store
        tenant = self.caller.tenant
        newest: Sequence[ConversationRow] = ()
        if rows:
            newest = await store.conversations(tenant, limit=MAX_CONVERSATIONS)
        placed: list[Past] = []
        left = {row.ref: row for row in rows}
        for conversation in newest:
            if not left:
                break
            held = await store.held(tenant, conversation.id)
            own = [left.pop(ref) for ref in [*left] if ref in held]
            placed += [past_of(row, conversation=conversation.name) for row in reversed(own)]
        return [*(past_of(row) for row in left.values()), *reversed(placed)]

    async def _read(self, call: RecallCall, counter: TokenCounter) -> RecallAnswer:
        store = self.runtime.store
        tenant = self.caller.tenant
        original = await store.original(tenant, call.ref)
        past = (
            past_of(original)
            if original is not None
            else covered_by(call.ref, await store.covered(tenant, call.ref))
        )
        if past is None:
            return _answer(UNKNOWN, counter)
        return await asyncio.to_thread(
            format_page, past, call.cursor, room=RECALL_TOKENS, counter=counter
        )


def _answer(text: str, counter: TokenCounter) -> RecallAnswer:
    return RecallAnswer(text, counter.count(text))
