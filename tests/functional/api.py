"""The management API of one Weir, as a caller with a key or the operator asks it."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.functional.harness import COUNTER, Deployment, InTurns, RunningWeir, Talk, answered, arrays_of
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

ADMIN = "admin-0123456789"
WINDOW = 4_096
TURNS = 5
NAME = "support-4711"
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
window: {window}
auth: {{admin_token: {admin}}}
"""


@dataclass(slots=True)
class Api:
    """The management API of one Weir, or of several in turns, and a conversation of the key ``sk-test``."""

    target: RunningWeir
    upstream: RunningSimulator
    http: httpx.AsyncClient
    folder: Path
    turns: InTurns = field(default_factory=lambda: InTurns(()))

    def __post_init__(self) -> None:
        if not self.turns.targets:
            self.turns = InTurns([self.target])

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = "sk-test", **options: Any
    ) -> httpx.Response:
        """One answer; a body that is not bytes is sent as JSON."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.request(
            method, f"{self.turns.root()}/weir/{path}", content=content, headers=headers, **options
        )

    async def get(self, path: str, *, key: str | None = "sk-test", **params: str) -> Any:
        """The JSON of an answer that is one."""
        found = await self.ask("GET", path, key=key, params=params)
        assert found.status_code == 200, found.text
        return found.json()

    async def of(self, part: str, *, key: str = "sk-test", **params: str) -> Any:
        """The same below the conversation."""
        return await self.get(f"conversations/{NAME}/{part}", key=key, **params)

    async def refused(
        self, status: int, method: str, path: str, body: object = None, *, key: str | None = "sk-test"
    ) -> dict[str, Any]:
        """The error of an answer with this status, in OpenAI's shape."""
        found = await self.ask(method, path, body, key=key)
        assert found.status_code == status, (path, found.status_code, found.text)
        error: dict[str, Any] = found.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        return error

    def talk(self, key: str = "sk-test", name: str = NAME) -> Talk:
        """A conversation with a name."""
        return Talk(self.turns.client(key, default_headers={"x-weir-conversation": name}))

    def sent(self) -> list[list[dict[str, Any]]]:
        """The arrays that went up."""
        return arrays_of(answered(self.upstream))


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    window: int = WINDOW,
    upstream: int = WINDOW,
    deployment: Deployment | None = None,
    rules: Mapping[str, Any] | None = None,
    more: str = "",
) -> AsyncIterator[Api]:
    """A Weir with a database and an operator, or those of a deployment; ``rules`` are its policy, if given.

    ``more`` stands in its configuration beside that.
    """
    async with serve_simulator(SimulatorSettings(window=upstream), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, window=window, admin=ADMIN) + more
        if rules is not None:
            yaml += f"policies: {{mine: {json.dumps(rules)}}}\ndefault_policy: mine\n"
        async with (
            (deployment or Deployment(folder / "w.db")).serving("", yaml=yaml, folder=folder, window=None) as turns,
            httpx.AsyncClient() as http,
        ):
            yield Api(turns.weirs[0], simulator, http, folder, turns)


async def compacted(api: Api, **options: Any) -> Talk:
    """A conversation of tool steps and questions that has gone over the window of 4,096 tokens."""
    talk = api.talk(**options)
    talk.grow(5, kind="agent")
    await talk.agent(1)
    talk.grow(6)
    await talk.chat(TURNS - 1)
    await api.turns.settled()
    assert "compact=" in talk.actions()[-1]
    return talk


def filled(pattern: str, **values: str) -> str:
    """A route's path with its named parts filled in."""
    return pattern.format(**{"id": NAME, "version": "1", "ref": "0123456789ab", "name": "balanced", **OTHERS, **values})


OTHERS = {"rid": "req_0123", "key": "somebody"}
BODIES: dict[str, object] = {
    "forget": {"scope": "nobody"},
    "notes": {"text": "a note"},
    "pin": {"ref": "0123456789ab"},
    "keys": {"name": "somebody"},
}
