"""What the page about the management API says is what its table of routes does."""

import inspect
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from policies.health import Snapshot, trend_of
from policies.ledger import ADDING, DROPPING, WINDOWS, Cut, EditKind
from policies.memory.checkpoint import Checkpoint
from policies.memory.notes import CATEGORIES, IMPORTANCE
from proxy.app import ROUTES
from proxy.errors import (
    Conflict,
    Forbidden,
    InvalidAPIKey,
    InvalidJSON,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ProxyError,
    RequestTooLarge,
)
from proxy.features.checkpoints import saved_of, version_of
from proxy.features.health_routes import alert_of, reading_of
from proxy.features.notes import MAX_NOTE_LEN
from proxy.features.removed import WHY, removed_of
from proxy.features.usage import taken, taken_by
from proxy.http import request as paging
from proxy.http.conversations import status_of
from proxy.http.request import decision_of, exchange_of, fields_of
from proxy.http.routes import PREFIX, ManagementRoute
from proxy.store.chain import AuditRow
from proxy.store.records import (
    AlertRow,
    CheckpointRow,
    ConversationRow,
    EvictionRow,
    ExchangeRow,
    NoteRow,
    RemovedRow,
    UsageRow,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### ((?:GET|POST|PUT|DELETE) /\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def said(route: ManagementRoute) -> str:
    """The section about a route."""
    return str(SECTIONS[f"{route.method} {PREFIX}{route.pattern}"])


def in_code(text: str) -> set[str]:
    """Words between back quotes, and the keys of examples."""
    return set(re.findall(r"`([\w.-]+)`", text)) | set(re.findall(r'"(\w+)":', text))


def test_the_page_has_exactly_the_routes_that_there_are() -> None:
    served = {f"{route.method} {PREFIX}{route.pattern}" for route in ROUTES}

    assert set(SECTIONS) == served
    assert len(served) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: f"{r.method} {r.pattern}")
def test_every_route_is_described_with_its_parameters_and_an_example(route: ManagementRoute) -> None:
    text = said(route)
    (example,) = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.startswith("curl ")]
    path = re.escape(f"$WEIR/{route.pattern}").replace(r"\{id\}", r"support-4711")
    path = re.sub(r"\\\{\w+\\\}", r"[\\w.]+", path)

    assert set(route.query) <= in_code(text) | set(re.findall(r"`(\w+)=\w+`", text))
    assert re.search(rf'"{path}(\?[\w=&]+)?"$', example)
    assert set(re.findall(r"[?&](\w+)=", example)) <= set(route.query)
    assert (f"-X {route.method} " in example) == (route.method != "GET")
    assert text.strip().splitlines()[0][0].isupper()


def route(pattern: str, method: str = "GET") -> ManagementRoute:
    (one,) = [r for r in ROUTES if (r.method, r.pattern) == (method, pattern)]
    return one


CONVERSATION = ConversationRow(
    id="conv-1", name="n", tenant="t", created=0.0, updated=0.0, model="m", requests=1, branches=1, version=1,
    tokens_before=1, tokens_after=1, limit=1, zone="green", actions="none",
)  # fmt: skip
CUT = Cut(covers=1, prefix=b"", text="", tokens=1, version=1, ref="0")
CHECKPOINT = CheckpointRow(branch="br", version=1, at=0.0, body=Checkpoint(goal="g").to_json(), cut=CUT)

EXCHANGE = ExchangeRow(
    id="r", tenant="t", conversation="c", name="n", branch="b", parent=None, at=0.0, model="m", policy="p", chain_end=b"",
    length=1, status=200, outcome="ok", tokens_before=1, tokens_after=1, limit=1, pressure=0.1, zone="green", actions="none",
)  # fmt: skip
USAGE = UsageRow(
    tenant="t", group="m", requests=1, failed=0, tokens_before=2, tokens_after=1, prompt=1, cached=0, completion=1, priced=1, estimated=0,
    cost=0.1, cost_saved=0.1, summarizer_tokens=0, summarizer_cost=0.0, first=0.0, last=0.0,
)  # fmt: skip


def test_every_field_of_an_answer_is_on_the_page() -> None:
    one = "conversations/{id}"
    assert set(fields_of(CONVERSATION)) <= in_code(said(route("conversations")))
    report = status_of(CONVERSATION, None, windows=1, events=0, soft={})
    assert set(report) - set(fields_of(CONVERSATION)) <= in_code(said(route(one)))
    shown = saved_of(CHECKPOINT)
    assert set(shown) == set(example(said(route(f"{one}/checkpoint"))))
    assert isinstance(shown["state"], dict)
    assert set(shown["state"]) == set(example(said(route(f"{one}/checkpoint")))["state"])
    assert set(version_of(CHECKPOINT)) <= in_code(said(route(f"{one}/checkpoints")))
    removed = removed_of(RemovedRow(ref="0", how="evict", version=1, at=0.0), with_text=True)
    assert set(removed) == set(example(said(route(f"{one}/removed")))["data"][0])
    opened = AlertRow(
        tenant="t",
        conversation="c",
        kind="loop",
        level="warning",
        category="anomaly",
        at=0.0,
        value=3,
        limit=3,
        said="",
    )
    assert set(alert_of(opened)) == set(example(said(route("health")))["data"][0])
    assert set(alert_of(opened)) == set(example(said(route(f"{one}/health")))["alerts"][0])
    snapshot = reading_of(Snapshot(0.0, 0.5, 0.0, None, None, None, 0.0, 1))
    assert set(snapshot) == set(example(said(route(f"{one}/health")))["snapshot"])
    assert set(asdict(trend_of([]))) == set(example(said(route(f"{one}/health")))["trend"])
    note = fields_of(NoteRow(id=b"", at=0.0, category="", importance="", source="", text=""))
    assert set(note) <= in_code(said(route(f"{one}/notes")))
    assert {"ref", "role", "tokens", "text", "blob"} <= in_code(said(route("search")))
    used = example(said(route("usage")))
    assert set(taken([USAGE])) == set(used["total"])
    assert set(taken_by(USAGE, by="model", names={})) == set(used["data"][0])
    request = exchange_of(EXCHANGE)
    assert {"decision", "layers", "detail"} | set(decision_of(EXCHANGE)) <= in_code(said(route(f"{one}/timeline")))
    assert {"decision", "layers", "detail"} <= set(request)
    told = in_code(said(route(f"{one}/audit"))) - {"audit", "limit", "events", "cursor"}
    evicted = {*EvictionRow.__struct_fields__, "ref", "freed"}
    assert set(AuditRow.__struct_fields__) <= told <= {*evicted, *AuditRow.__struct_fields__}


def example(text: str) -> dict[str, Any]:
    """The answer that a section shows."""
    (shown,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(json.loads(shown))


def test_notes_are_described_as_they_are_checked() -> None:
    text = said(route("conversations/{id}/notes", "POST"))

    assert set(CATEGORIES) | set(IMPORTANCE) <= in_code(text)
    assert f"1 to {MAX_NOTE_LEN:,} characters" in text


@pytest.mark.requirement("A4.18")
def test_the_headers_of_a_page_of_an_original_are_on_the_page() -> None:
    sent = set(re.findall(r"x-weir-[a-z0-9]+", inspect.getsource(paging)))

    assert len(sent) == 4
    assert sent <= in_code(said(route("blobs/{ref}")))


def test_every_error_of_the_api_is_on_the_page() -> None:
    for error in (
        InvalidRequest, InvalidJSON, InvalidAPIKey, Forbidden, NotFound, MethodNotAllowed, Conflict, RequestTooLarge, ProxyError,
    ):  # fmt: skip
        assert f"| {error.status} | `{error.code}` |" in PAGE


def test_every_way_out_of_the_window_has_a_reason_in_words() -> None:
    assert set(WHY) == (set(map(str, EditKind)) - set(map(str, ADDING))) | DROPPING | WINDOWS | {"compact"}
