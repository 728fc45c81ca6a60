"""The management API: what Weir knows of a caller's conversations, and the originals of what it removed.

A caller sees its own conversations only; the admin token sees all.
"""

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs, unquote

from policies.clipping import TEXT_OF
from proxy.caching import shown
from proxy.errors import InvalidAPIKey, InvalidRequest, NotFound, ProxyError
from proxy.intake import Receive
from proxy.keys import credentials_in, presented, same_secret
from proxy.relay import Send
from proxy.routes.respond import JSON, respond, respond_error, respond_json
from proxy.runtime import Runtime
from proxy.store import Store, StoreError
from proxy.store.records import ConversationRow, ExchangeRow
from proxy.wire.chat import body_of, read_message
from proxy.wire.raw import split_array

PREFIX = "/weir/"
PAGE = 64 * 1024
MOST_DIGITS = 15
MOST_ROWS = 500
TEXT = b"text/plain; charset=utf-8"
SHOWN = tuple(each.name for each in fields(ExchangeRow) if each.name not in {"trend", "asked_again"})


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
            rows = await store.conversations(tenant, limit=_limit(query.get("limit", "50")))
            await respond_json(send, {"data": [conversation_json(row) for row in rows]})
        elif path == ["search"]:
            if tenant is None:
                raise NotFound("Search needs a tenant's own key.")
            if not query.get("q"):
                raise InvalidRequest("q should say what to search for.", param="q")
            found = await store.search(tenant, query["q"])
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
        """The original of a removed message, or of all that a summary covers, in pages of at most 64 KiB.

        ``REF`` is the JSON that the client sent, ``REF.txt`` what it says, as UTF-8. Cursors count bytes, and a page
        ends between two characters. Size and SHA-256 are those of the whole.
        """
        if tenant is None:
            raise InvalidAPIKey("Originals are read with the key of the caller that sent them.")
        start = _cursor(query.get("cursor", "0"))
        body = await self._original(tenant, ref.removesuffix(TEXT_OF))
        as_text = ref.endswith(TEXT_OF)
        page = await asyncio.to_thread(_page, body, start, as_text=as_text)
        headers = [(b"x-weir-size", str(page.size).encode()), (b"x-weir-sha256", page.sha256.encode())]
        headers.append((b"x-weir-end", b"true" if page.following is None else b"false"))
        if page.following is not None:
            headers.append((b"x-weir-cursor", str(page.following).encode()))
        await respond(send, page.part, kind=TEXT if as_text else JSON, headers=headers)

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
            last = (await store.timeline(row, limit=1))[-1:]
            await respond_json(send, conversation_json(row) | state_json(last[0] if last else None))
        elif part == "timeline":
            await respond_json(send, {"data": [exchange_json(e) for e in await store.timeline(row)]})
        elif part == "checkpoint":
            # a cut that drops messages without a summary is stored beside the checkpoints, without a body
            checkpoints = [each for each in await store.checkpoints(row) if each.body]
            if not checkpoints:
                raise NotFound(f"Conversation {name[:80]!r} has no checkpoint: nothing was compacted in it.")
            newest = checkpoints[-1]
            state = json.loads(newest.body)
            summary = {"version": newest.version, "covers": newest.cut.covers, "ref": newest.cut.ref}
            await respond_json(send, {**summary, "summary": newest.cut.text, "state": state})
        else:
            raise NotFound(f"A conversation has no {part[:40]!r} here.")


@dataclass(frozen=True, slots=True)
class _Page:
    part: bytes
    following: int | None
    size: int
    sha256: str


def _limit(given: str) -> int:
    """How many rows a caller asks for, at most 500. Raises InvalidRequest for what is no number from 1 on."""
    if not given.isascii() or not given.isdigit() or int(given[:MOST_DIGITS]) < 1:
        raise InvalidRequest("limit must be a number from 1 on.", param="limit")
    return min(MOST_ROWS, int(given[:MOST_DIGITS]))


def _cursor(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS):
        raise InvalidRequest("cursor must be a number of bytes.", param="cursor")
    return int(given)


def _page(body: bytes, start: int, *, as_text: bool) -> _Page:
    """The bytes from ``start`` on, 64 KiB or a few less, so that no character is parted; nothing beyond the end."""
    whole = _said(body) if as_text else body
    stop = min(len(whole), start + PAGE)
    while start + 4 < stop < len(whole) and whole[stop] & 0xC0 == 0x80:
        stop -= 1
    return _Page(whole[start:stop], stop if stop < len(whole) else None, len(whole), sha256(whole).hexdigest())


def _said(body: bytes) -> bytes:
    """The text of a message, or of each in a list of them, as UTF-8."""
    messages = split_array(body) if body.startswith(b"[") else (body,)
    return "\n".join(body_of(read_message(raw)).text for raw in messages or ()).encode("utf-8", "surrogatepass")


def conversation_json(row: ConversationRow) -> dict[str, object]:
    """A conversation as the API shows it."""
    return asdict(row)


def state_json(last: ExchangeRow | None) -> dict[str, object]:
    """The reading of the conversation's last request, the buckets it filled, and how many requests are left."""
    if last is None:
        return {"pressure": None, "buckets": {}, "turns_until_red": None}
    reading = {
        "current_tokens": last.tokens_after,
        "max_tokens": last.detail.get("base"),
        "utilization_pct": round(100 * last.pressure, 1),
        "zone": last.zone,
        "velocity_tokens_per_turn": last.velocity,
        "turns_until_red": last.turns_until_red,
        "source": last.detail.get("source"),
    }
    return {"pressure": reading, "buckets": last.detail.get("buckets", {}), "turns_until_red": last.turns_until_red}


def exchange_json(row: ExchangeRow) -> dict[str, object]:
    """One request of a conversation as the API shows it; what the next one is planned from is not shown."""
    own = {name: getattr(row, name) for name in SHOWN}
    return own | {"chain_end": row.chain_end.hex(), "detail": dict(row.detail)} | shown(row.detail)
