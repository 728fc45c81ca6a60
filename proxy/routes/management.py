"""The management API: what Weir knows of a caller's conversations, and the originals of what it removed.

A caller sees its own conversations only; the admin token sees all.
"""

import json
from collections.abc import MutableMapping
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs, unquote

from proxy.errors import InvalidAPIKey, NotFound, ProxyError
from proxy.intake import Receive
from proxy.keys import credentials_in, presented, same_secret
from proxy.relay import Send
from proxy.routes.respond import respond, respond_error, respond_json
from proxy.runtime import Runtime
from proxy.store import Store, StoreError
from proxy.store.records import ConversationRow, ExchangeRow

PREFIX = "/weir/"
PAGE = 64 * 1024


class Management:
    """The ASGI application of ``/weir/…``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one question."""
        del receive
        try:
            await self._answer(scope, send)
        except StoreError as error:
            await respond_error(send, NotFound(f"The store cannot be read: {type(error).__name__}."))
        except ProxyError as error:
            await respond_error(send, error)

    async def _answer(self, scope: MutableMapping[str, Any], send: Send) -> None:
        tenant = self._tenant(scope)
        path = [unquote(part) for part in scope["path"].removeprefix(PREFIX).strip("/").split("/")]
        query = {k: v[0] for k, v in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()}
        if scope["method"] != "GET":
            raise NotFound("The management API answers GET requests here.")
        store = self._runtime.store
        if path[0] == "blobs" and len(path) > 1:
            await self._blob(send, tenant, path[1], query)
        elif store is None:
            raise NotFound("This Weir runs without a store.")
        elif path == ["conversations"]:
            rows = await store.conversations(tenant, limit=min(500, int(query.get("limit", "50"))))
            await respond_json(send, {"data": [conversation_json(row) for row in rows]})
        elif path == ["search"]:
            if tenant is None:
                raise NotFound("Search needs a tenant's own key.")
            found = await store.search(tenant, query.get("q", ""))
            data = [{"ref": o.ref, "role": o.role, "tokens": o.tokens, "text": o.text[:2000]} for o in found]
            await respond_json(send, {"data": data})
        elif path[0] == "conversations" and len(path) in (2, 3):
            await self._conversation(send, store, tenant, path[1], path[2] if len(path) > 2 else "")
        else:
            raise NotFound(f"There is nothing at {scope['path']}.")

    def _tenant(self, scope: MutableMapping[str, Any]) -> str | None:
        """The tenant that asks, None for the operator with the admin token."""
        headers = credentials_in(scope["headers"])
        token = self._runtime.config.admin_token
        if token is not None and same_secret(presented(headers), token.get_secret_value()):
            return None
        return self._runtime.keyring.identify(headers).tenant

    async def _blob(self, send: Send, tenant: str | None, ref: str, query: dict[str, str]) -> None:
        """The original of a removed message, or of all that a summary covers, in pages of 64 KiB."""
        if tenant is None:
            raise InvalidAPIKey("Originals are read with the key of the caller that sent them.")
        body = await self._original(tenant, ref)
        start = int(query.get("cursor", "0")) if query.get("cursor", "0").isdigit() else 0
        part = body[start : start + PAGE]
        following = start + PAGE if start + PAGE < len(body) else None
        headers = [(b"x-weir-size", str(len(body)).encode())]
        if following is not None:
            headers.append((b"x-weir-cursor", str(following).encode()))
        await respond(send, part, headers=headers)

    async def _original(self, tenant: str, ref: str) -> bytes:
        waiting = self._runtime.settler.original(tenant, ref)
        store = self._runtime.store
        if waiting is not None:
            return waiting
        if store is not None:
            original = await store.original(tenant, ref)
            if original is not None:
                return original.body
            covered = await store.covered(tenant, ref)
            if covered:
                return b"[" + b",".join(o.body for o in covered) + b"]"
        raise NotFound(f"There is no original with the ref {ref[:64]!r}.")

    async def _conversation(self, send: Send, store: Store, tenant: str | None, name: str, part: str) -> None:
        row = await store.conversation(tenant, name)
        if row is None:
            raise NotFound(f"There is no conversation {name[:80]!r}.")
        if part == "":
            await respond_json(send, conversation_json(row))
        elif part == "timeline":
            await respond_json(send, {"data": [exchange_json(e) for e in await store.timeline(row)]})
        elif part == "checkpoint":
            checkpoints = await store.checkpoints(row)
            if not checkpoints:
                raise NotFound(f"Conversation {name[:80]!r} has no checkpoint: nothing was compacted in it.")
            newest = checkpoints[-1]
            state = json.loads(newest.body) if newest.body else {}
            summary = {"version": newest.version, "covers": newest.cut.covers, "ref": newest.cut.ref}
            await respond_json(send, {**summary, "summary": newest.cut.text, "state": state})
        else:
            raise NotFound(f"A conversation has no {part[:40]!r} here.")


def conversation_json(row: ConversationRow) -> dict[str, object]:
    """A conversation as the API shows it."""
    return asdict(row)


def exchange_json(row: ExchangeRow) -> dict[str, object]:
    """One request of a conversation as the API shows it."""
    shown = asdict(row)
    shown["chain_end"] = row.chain_end.hex()
    shown["detail"] = dict(row.detail)
    return shown
