"""What may be fetched and deleted of ``/v1/responses`` and ``/v1/conversations``."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from proxy.simulator.memory import TenantMemory
from proxy.simulator.model import sender_of
from proxy.simulator.responses import SimulatedResponses
from proxy.simulator.window import Problem, problem_body


def stored_routes(responses: SimulatedResponses) -> list[BaseRoute]:
    """The routes beside the endpoint that is answered by the model."""

    def kept(request: HTTPRequest) -> tuple[TenantMemory, str]:
        return responses.memory.of(sender_of(request.headers).credential), request.path_params.get("name", "")

    def missing(what: str, name: str) -> Response:
        problem = Problem(message=f"{what} with id '{name}' not found.", status=404)
        return JSONResponse(problem_body(problem, responses.shape), 404)

    async def response(request: HTTPRequest) -> Response:
        tenant, name = kept(request)
        if name not in tenant.answers:
            return missing("Response", name)
        if request.method == "DELETE":
            del tenant.answers[name]
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(tenant.answers[name].body)

    async def items(request: HTTPRequest) -> Response:
        tenant, name = kept(request)
        if name not in tenant.answers:
            return missing("Response", name)
        given = [
            {"type": "message", "id": f"item_{name}_{at}", **item} for at, item in enumerate(tenant.answers[name].given)
        ]
        ends = {"first_id": given[0]["id"], "last_id": given[-1]["id"]} if given else {}
        return JSONResponse({"object": "list", "data": given, "has_more": False, **ends})

    async def create(request: HTTPRequest) -> Response:
        tenant, _ = kept(request)
        name = f"conv_{len(tenant.conversations):024x}"
        given = await request.body()
        tenant.conversations[name] = list((await request.json()).get("items") or ()) if given else []
        return JSONResponse(_conversation(name))

    async def conversation(request: HTTPRequest) -> Response:
        tenant, name = kept(request)
        if name not in tenant.conversations:
            return missing("Conversation", name)
        if request.method == "DELETE":
            del tenant.conversations[name]
            return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})
        return JSONResponse(_conversation(name))

    return [
        Route("/v1/responses/{name}", response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", items, methods=["GET"]),
        Route("/v1/conversations", create, methods=["POST"]),
        Route("/v1/conversations/{name}", conversation, methods=["GET", "DELETE"]),
    ]


def _conversation(name: str) -> Mapping[str, Any]:
    return {"id": name, "object": "conversation", "created_at": 0, "metadata": {}}
