"""What may be fetched and deleted of ``/v1/responses`` and ``/v1/conversations``."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from proxy.simulator.memory import TenantMemory
from proxy.simulator.model import sender_of
from proxy.simulator.responses import SimulatedResponses
from proxy.simulator.window import Problem, problem_body


def stored_routes(responses: SimulatedResponses) -> list[BaseRoute]:

    def tenant_of(request: HTTPRequest) -> TenantMemory:
        return responses.memory.of(sender_of(request.headers).credential)

    def missing(what: str, name: str) -> Response:
        problem = Problem(message=f"{what} with id '{name}' not found.", status=404)
        return JSONResponse(problem_body(problem, responses.shape), 404)

    async def response(request: HTTPRequest) -> Response:
        answers, name = tenant_of(request).answers, request.path_params["name"]
        if name not in answers:
            return missing("Response", name)
        if request.method == "DELETE":
            del answers[name]
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if not request.url.path.endswith("/input_items"):
            return JSONResponse(answers[name].body)
        data = [{"type": "message", "id": f"item_{at}", **item} for at, item in enumerate(answers[name].given)]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def create(request: HTTPRequest) -> Response:
        conversations = tenant_of(request).conversations
        name = f"conv_{uuid4().hex}"
        conversations[name] = list((await request.json()).get("items") or ()) if await request.body() else []
        return JSONResponse(_conversation(name))

    async def conversation(request: HTTPRequest) -> Response:
        conversations, name = tenant_of(request).conversations, request.path_params["name"]
        if name not in conversations:
            return missing("Conversation", name)
        if request.method == "DELETE":
            del conversations[name]
            return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})
        return JSONResponse(_conversation(name))

    return [
        Route("/v1/responses/{name}", response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", response, methods=["GET"]),
        Route("/v1/conversations", create, methods=["POST"]),
        Route("/v1/conversations/{name}", conversation, methods=["GET", "DELETE"]),
    ]


def _conversation(name: str) -> Mapping[str, Any]:
    return {"id": name, "object": "conversation", "created_at": 0, "metadata": {}}
