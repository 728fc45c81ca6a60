"""What the simulated server keeps or hands out sealed: answers, items, conversations, threads, reasoning.

A seal is a keyed hash (HMAC-SHA256) over what is sealed, so that an altered one, and one moved elsewhere, is noticed.
The key follows from the seed: simulators with the same seed take one another's.
"""

import base64
import hashlib
import hmac
import json
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tests.upstream.delivery import compact
from tests.upstream.model import sender_of
from tests.upstream.window import Dialect, Problem, problem_body

MAC = 16
ANSWERS_KEPT = 5_000


def owner(credential: str) -> str:
    return hashlib.sha256(credential.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Sealer:
    def __init__(self, seed: int) -> None:
        self._key = hashlib.sha256(f"simulator {seed}".encode()).digest()

    def _mac(self, data: bytes) -> bytes:
        return hmac.new(self._key, data, hashlib.sha256).digest()[:MAC]

    def close(self, prefix: str, value: Mapping[str, Any]) -> str:
        data = compact(value)
        return prefix + base64.urlsafe_b64encode(self._mac(data) + data).decode()

    def read(self, prefix: str, text: str) -> Mapping[str, Any] | None:
        if not text.startswith(prefix):
            return None
        try:
            raw = base64.b64decode(text[len(prefix) :], altchars=b"-_", validate=True)
        except ValueError:
            return None
        if not hmac.compare_digest(raw[:MAC], self._mac(raw[MAC:])):
            return None
        value: Mapping[str, Any] = json.loads(raw[MAC:])
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """An answer that may be fetched and gone on from; ``items`` are the whole context up to its end."""

    body: Mapping[str, Any]
    given: Sequence[Mapping[str, Any]]
    items: tuple[Mapping[str, Any], ...]


@dataclass(slots=True, kw_only=True)
class ServerThread:
    messages: tuple[Mapping[str, Any], ...]
    fields: Mapping[str, Any]
    at: float = field(default_factory=time.monotonic)
    continued: bool = False


@dataclass(slots=True)
class TenantMemory:
    """What is kept of one credential's requests; ``reasons`` names the reasoning that an item was made with."""

    answers: OrderedDict[str, StoredAnswer] = field(default_factory=OrderedDict)
    items: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    conversations: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    threads: dict[str, ServerThread] = field(default_factory=dict)

    def store(self, name: str, answer: StoredAnswer) -> None:
        self.answers[name] = answer
        while len(self.answers) > ANSWERS_KEPT:
            self.answers.popitem(last=False)


ServerMemory = defaultdict[str, TenantMemory]
"""What is kept, by credential."""


def stored_routes(memory: ServerMemory, dialect: Dialect) -> list[BaseRoute]:
    """What may be fetched and deleted of ``/v1/responses`` and ``/v1/conversations``."""

    def kept(path: str, what: str, deleted: str, read: Callable[[str, Any], Any]) -> Route:
        async def endpoint(request: HTTPRequest) -> Response:
            tenant, name = memory[sender_of(request.headers.get).credential], request.path_params["name"]
            there: MutableMapping[str, Any] = tenant.answers if what == "Response" else tenant.conversations
            if name not in there:
                problem = Problem(message=f"{what} with id '{name}' not found.", status=404)
                return JSONResponse(problem_body(problem, dialect), 404)
            if request.method != "DELETE":
                return JSONResponse(read(name, there[name]))
            del there[name]
            return JSONResponse({"id": name, "object": deleted, "deleted": True})

        return Route(path, endpoint, methods=["GET", "DELETE"] if deleted else ["GET"])

    async def create(request: HTTPRequest) -> Response:
        conversations, name = memory[sender_of(request.headers.get).credential].conversations, f"conv_{uuid4().hex}"
        conversations[name] = list((await request.json()).get("items") or ()) if await request.body() else []
        return JSONResponse(_conversation(name, ()))

    return [
        kept("/v1/responses/{name}", "Response", "response", lambda _, answer: answer.body),
        kept("/v1/responses/{name}/input_items", "Response", "", _given),
        Route("/v1/conversations", create, methods=["POST"]),
        kept("/v1/conversations/{name}", "Conversation", "conversation.deleted", _conversation),
    ]


def _given(_: str, answer: StoredAnswer) -> Mapping[str, Any]:
    data = [{"type": "message", "id": f"item_{at}", **item} for at, item in enumerate(answer.given)]
    return {"object": "list", "data": data, "has_more": False}


def _conversation(name: str, _: Sequence[Any]) -> Mapping[str, Any]:
    return {"id": name, "object": "conversation", "created_at": 0, "metadata": {}}
