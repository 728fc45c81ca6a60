"""The OpenAPI document of a running Weir, held against what it answers."""

import re
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from openapi_schema_validator import OAS31Validator

from proxy.app import ROUTES
from proxy.http.routes import PREFIX
from tests.functional.api import Api


@dataclass(slots=True)
class Contract:
    """The document, and which of its answers were seen, as (method, path, status)."""

    document: dict[str, Any]
    seen: set[tuple[str, str, int]] = field(default_factory=set)

    @classmethod
    async def of(cls, api: Api) -> Self:
        """The document that a Weir gives without a key."""
        return cls((await api.ask("GET", "openapi.json", key=None)).json())

    def problems(self, schema: dict[str, Any], value: object) -> list[str]:
        """What is wrong with a value."""
        whole = {**schema, "components": self.document["components"]}
        return [f"{error.json_path}: {error.message}" for error in OAS31Validator(whole).iter_errors(value)]

    def check(self, method: str, answer: httpx.Response) -> None:
        """Fail for an answer that the document does not describe."""
        path = self.path_of(answer.request.url.raw_path.decode())
        operation = self.document["paths"][path][method.lower()]
        described = operation["responses"].get(str(answer.status_code))
        if described is not None and "$ref" in described:
            described = self.document["components"]["responses"][described["$ref"].rpartition("/")[2]]
        assert described is not None, (method, path, answer.status_code, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in described["content"], (method, path, kind)
        for name, header in described.get("headers", {}).items():
            assert name in answer.headers or not header["required"], (path, name)
        if kind == "application/json" and "x-weir-size" not in answer.headers:
            wrong = self.problems(described["content"][kind]["schema"], answer.json())
            assert wrong == [], (method, path, answer.status_code, wrong[:3])
        self.seen.add((method, path, answer.status_code))

    def path_of(self, target: str) -> str:
        """The path of the document that a request was for."""
        parts = urlsplit(target).path.removeprefix(PREFIX).split("/")
        patterns = sorted((route.pattern for route in ROUTES), key=lambda p: p.count("{"))
        for pattern in patterns:
            if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(pattern)), "/".join(parts)):
                return PREFIX + pattern
        raise AssertionError(f"no path for {target}")
