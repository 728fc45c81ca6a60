"""Nothing goes to an upstream for a client without a destination, and one module makes them."""

import ast
import functools
import inspect
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from proxy.access.destination import _NAMING, CHAT, Destination, Route, route_of
from proxy.app import routes
from proxy.upstream.client import Upstreams

ROOT = Path(__file__).resolve().parents[2]
SHELL = [path for path in sorted((ROOT / "proxy").rglob("*.py")) if "simulator" not in path.parts]


@functools.cache
def all_calls() -> list[tuple[str, ast.Call]]:
    """Every call in the shell, with its file."""
    return [
        (str(path.relative_to(ROOT)), node)
        for path in SHELL
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def calls(name: str) -> dict[str, list[ast.Call]]:
    """Calls of what is called so, as a name or an attribute, by file."""
    found: dict[str, list[ast.Call]] = {}
    for file, node in all_calls():
        if name in {getattr(node.func, "id", None), getattr(node.func, "attr", None)}:
            found.setdefault(file, []).append(node)
    return found


@pytest.mark.requirement("P7", "S.7")
def test_one_module_makes_destinations_and_nothing_is_sent_without_one() -> None:
    assert set(calls("Destination")) == {"proxy/access/destination.py"}
    asked = {name: inspect.signature(getattr(Upstreams, name), eval_str=True) for name in ("send", "post")}
    for signature in asked.values():
        assert [each.annotation for each in signature.parameters.values()][1] is Destination
    senders = {
        file for file in calls("send") if any(ast.unparse(c.func).endswith("client.send") for c in calls("send")[file])
    }
    assert senders == {"proxy/upstream/client.py", "proxy/features/alerts.py"}, "alerts go to the operator's webhook"


@pytest.mark.requirement("P7")
def test_a_clients_request_gets_its_destination_where_its_model_was_judged() -> None:
    """What Weir asks itself is asked by these alone; a route would have to be put here to go round the judgement."""
    assert set(calls("by_weir")) == {"proxy/cli/evaluate.py", "proxy/exchange/replies.py", "proxy/http/models.py"}
    assert set(calls("for_managed")) == {"proxy/exchange/read.py"}
    assert set(calls("for_relay")) == set(calls("unread")) == {"proxy/http/relay.py"}


@pytest.mark.requirement("P7", "S.10")
def test_every_path_that_can_be_asked_for_is_in_one_list() -> None:
    served = [(route.path, type(getattr(route, "app", None)).__name__) for route in routes(MagicMock())]
    assert [path for path, _ in served if path.startswith(("/v1", "/openai"))] == [
        "/v1/{rest:path}",
        "/openai/deployments/{rest:path}",
    ]
    assert len(served) == len({path for path, _ in served} | {"/weir/ui"}) + 1


@pytest.mark.parametrize("name", _NAMING)
def test_a_route_is_the_same_however_it_is_spelled(name: str) -> None:
    managed = dict.fromkeys(("chat/completions", "responses", "messages"), "managed")
    counted = dict.fromkeys(("responses/input_tokens", "responses/compact", "messages/count_tokens"), "counted")
    kind = (managed | counted).get(name, "model")
    plain = Route(kind=kind, path=f"/{name}")
    doubled, escaped = name.replace("/", "//"), name.replace("/", "%2F").replace("s", "%73")
    spelled = [
        f"/v1/{name}",
        f"/v1/{name}/",
        f"/v1//{doubled}//",
        f"/v1/v1/{name}",
        f"//v1/{escaped}",
        f"/v1/{escaped}%2f",
    ]
    assert [route_of("POST", path) for path in spelled] == [plain] * len(spelled)
    with_model = Route(kind=kind, path=f"/{name}", model="org/gpt-4")
    for place in ("/v1/engines", "/v1/deployments", "/openai/deployments", "/openai//deployments"):
        for model in ("org/gpt-4", "org%2Fgpt-4", "org%2fgpt%2D4"):
            assert route_of("POST", f"{place}/{model}/{name}/") == with_model
    assert {route_of(method, f"/v1/{name}").kind for method in ("GET", "PUT", "DELETE", "PATCH")} == {"other"}


def test_what_is_no_route_of_a_model_is_another_and_goes_up_as_it_came() -> None:
    for rest in (
        "/files",
        "/files/a%2Fb?",
        "//files",
        "/chat/completions/c_1",
        "/chat%252fcompletions",
        "/engines",
        "/",
    ):
        assert route_of("POST", f"/v1{rest}") == Route(kind="other", path=rest)
    for target in ("/v2/files", "/V1/files", "/openai/files", "/", "", "*", "/openai/v1/responses", "/v1"):
        assert route_of("POST", target) is None
    assert route_of("GET", "/v1/models/") == Route(kind="models", path="/models")
    assert route_of("GET", "/v1/models/org%2Fgpt-4") == Route(
        kind="models", path="/models/org/gpt-4", model="org/gpt-4"
    )
    assert route_of("POST", "/v1/chat/completions") == CHAT
