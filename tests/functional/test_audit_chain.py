"""What a real run writes into the audit, what it never does, and how an operator reads and checks it."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from policies.summary.prompts import PROMPTS
from proxy.cli import main
from proxy.store.chain import AuditRow, AuditType
from tests.functional.harness import COUNTER, EVICTING, Deployment, InTurns, RunningWeir, Talk, opening
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

ADMIN = "admin-0123456789"
CANARY = "zanzibarcanary"
KEY = f"sk-{CANARY}-7391"
NAME = f"support-{CANARY}"
WINDOW = 4_096
OFTEN_ABOVE = {**EVICTING, "health": {"utilization": 0.4}}
EVICTION = {name: json.dumps(rules) for name, rules in {"balanced": OFTEN_ABOVE, **EVICTING}.items()}
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
window: {window}
auth: {{admin_token: {admin}}}
policies:
  balanced: {balanced}
  written:
    preset: balanced
    cascade: {cascade}
    shapes: {shapes}
    summarizer: summariser
    summaries: {{wait: 20}}
  turning: {{cascade: [{{layer: rollover}}]}}
  watched: {{enforce: global, buckets: {{tool_outputs: {{cap: 900, soft: 0.5, on_overflow: warn}}}}}}
  strict: {{enforce: bucket, buckets: {{tool_outputs: {{cap: 900, on_overflow: reject}}}}}}
  observed: {{mode: observe}}
"""


@dataclass(slots=True)
class Run:
    """Weirs with a database, their operator's client, and conversations full of canaries."""

    turns: InTurns
    http: httpx.AsyncClient
    database: Path

    @property
    def target(self) -> RunningWeir:
        """The first of them."""
        return self.turns.weirs[0]

    def talk(self, name: str = NAME, policy: str | None = None, **headers: str) -> Talk:
        """A conversation with a name under a policy; every message of it has the canary."""
        given = {"x-weir-conversation": name, **headers, **({} if policy is None else {"x-weir-policy": policy})}
        messages = opening()
        messages[0]["content"] += f" {CANARY}"
        return Talk(self.turns.client(KEY, default_headers=given), messages, mark=CANARY)

    async def ask(self, method: str, path: str, body: object = None, *, key: str = KEY) -> httpx.Response:
        """One answer of the management API."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        return await self.http.request(
            method, f"{self.turns.root()}/weir/{path}", content=content, headers={"authorization": f"Bearer {key}"}
        )

    async def rows(self, kind: AuditType | None = None) -> list[AuditRow]:
        """The rows of everybody's audit, oldest first."""
        await self.turns.settled()
        return (await self.turns.store.audit(None, kind=kind, limit=10_000))[::-1]

    async def command(self, *arguments: str) -> Any:
        """The result of a command, run beside the server."""
        given = [*arguments, "--store", f"sqlite+aiosqlite:///{self.database}"]
        return await asyncio.to_thread(CliRunner().invoke, main, given, env={"WEIR_CONFIG": ""})


@asynccontextmanager
async def running(folder: Path, *, window: int = WINDOW, deployment: Deployment | None = None) -> AsyncIterator[Run]:
    """A Weir in front of a window of 4,096 tokens, or those of a deployment, and a model that writes summaries."""
    settings = SimulatorSettings(window=window, summary_model="summariser")
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, window=window, admin=ADMIN, **EVICTION)
        async with (
            (deployment or Deployment(folder / "w.db")).serving("", yaml=yaml, folder=folder, window=None) as turns,
            httpx.AsyncClient() as http,
        ):
            yield Run(turns, http, folder / "w.db")


@pytest.fixture
async def run(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Run]:
    async with running(tmp_path, deployment=deployment) as run:
        yield run


async def compacted(run: Run, **options: Any) -> Talk:
    """A conversation of tool steps and questions in which things were evicted and summarised."""
    talk = run.talk(**options)
    talk.grow(5, kind="agent")
    await talk.agent(2)
    talk.grow(6)
    await talk.chat(4)
    await run.turns.settled()
    return talk


def facts(row: AuditRow) -> dict[str, Any]:
    return dict(json.loads(row.facts))


async def do_everything(run: Run) -> None:
    """One thing of every kind that the audit knows."""
    await compacted(run, policy="written")
    await run.talk("next", **{"x-weir-resume": NAME}).chat(1)
    ref = (await run.ask("GET", f"conversations/{NAME}/removed")).json()["data"][-1]["ref"]
    await run.ask("POST", f"conversations/{NAME}/notes", {"text": f"never forget {CANARY}"})
    await run.ask("POST", f"conversations/{NAME}/pin", {"ref": ref})
    await run.ask("POST", f"conversations/{NAME}/compact")
    assert (await run.ask("POST", f"conversations/{NAME}/rollback/0")).status_code == 200
    turning = run.talk("turning", policy="turning")
    turning.grow(12)
    await turning.chat(1)
    watched = run.talk("watched", policy="watched")
    await watched.agent(5)
    strict = run.talk("strict", policy="strict")
    strict.grow(5, kind="agent")
    with pytest.raises(openai.BadRequestError):
        await strict.ask()
    await run.ask("POST", "conversations/watched/close")
    await run.ask("DELETE", f"conversations/{NAME}")
    made = await run.ask("PUT", "policies/support", b"preset: balanced", key=ADMIN)
    assert made.status_code == 201
    await run.ask("DELETE", "policies/support", key=ADMIN)
    assert (await run.command("keys", "create", "--name", "bot")).exit_code == 0
    assert (await run.command("keys", "revoke", "bot")).exit_code == 0


@pytest.mark.requirement("A0.138", "A0.147", "S.2", "S.16", "P7")
async def test_every_type_of_row_is_written_by_a_real_run_and_none_holds_content_or_a_key(run: Run) -> None:
    await do_everything(run)
    rows = await run.rows()
    store = run.target.runtime.store
    assert store is not None
    assert {row.type for row in rows} == set(map(str, AuditType))
    (canary,) = {row.tenant for row in rows} - {""}
    assert [(c.tenant, c.broken) for c in await store.verify()] == [("", None), (canary, None)]
    connection = sqlite3.connect(run.database)
    stored = "\n".join(
        " ".join(v.hex() if isinstance(v, bytes) else str(v) for v in row)
        for row in connection.execute("SELECT * FROM audit")
    )
    written = "\n".join([stored, *map(str, rows)])  # what is packed there too
    words = {"bravo", "charlie", "module_", "buffer", "never forget"}
    connection.close()
    assert len(written) > 10_000
    for secret in (CANARY, CANARY.encode().hex(), "-7391", ADMIN, "axios", "read_file", "careful coding", *words):
        assert secret not in written, secret
    at = max(row.at for row in rows) + 1
    await store.prune(at, at=at + 1)
    assert all(chain.first > 1 and chain.broken is None for chain in await store.verify())


@pytest.mark.requirement("D20", "A0.72", "A0.43", "A0.148")
async def test_rows_of_a_batch_name_the_request_the_prompt_and_what_it_came_to(tmp_path: Path) -> None:
    async with running(tmp_path, window=8_192) as run:
        talk = run.talk(policy="written")
        await talk.agent(18)
        talk.grow(4)
        await talk.chat(8)
        evicted = [facts(row) for row in await run.rows(AuditType.EVICTION)]
        cut = await run.rows(AuditType.COMPACTION)
        timeline = (await run.ask("GET", f"conversations/{NAME}/timeline")).json()["data"]
    asked = [facts(row) for row in cut if facts(row)["prompt"] != "extract"]
    assert evicted
    assert "prepared+extract" in {each["origin"] for each in asked}
    for each in asked:
        assert each["calls"] >= 1, "also where it was prepared after an earlier answer"
        assert (each["prompt"], each["prompt_digest"]) in {(p.purpose, p.digest) for p in PROMPTS.values()}
        assert each["compression_ratio"] == round(each["original_tokens"] / each["compressed_tokens"], 2) > 1
    for each in evicted:
        assert each["freed"] == each["tokens_before"] - each["tokens_after"] > 0
        assert each["policy"] == "written"
        assert each["action"] in {"evict_and_compress", "emergency_compaction"}
        assert each["utilization_after"] < each["utilization_before"]
    assert {row.request for row in cut} <= {row["id"] for row in timeline}
    assert len(talk.headers) == len(timeline)


@pytest.mark.requirement("A0.87", "A0.147")
async def test_a_full_bucket_is_told_with_its_figures_whether_the_request_went_on_or_not(run: Run) -> None:
    watched = run.talk("watched", policy="watched")
    await watched.agent(5)
    strict = run.talk("strict", policy="strict")
    strict.grow(5, kind="agent")
    with pytest.raises(openai.BadRequestError) as refused:
        await strict.ask()
    violations = [facts(row) for row in await run.rows(AuditType.BUDGET_VIOLATION)]
    warnings = [facts(row) for row in await run.rows(AuditType.BUDGET_WARNING)]
    (refusal,) = [facts(row) for row in await run.rows(AuditType.REFUSED)]
    for each in violations:
        (event,) = each["events"]
        assert event["component"] == "tool_outputs"
        assert event["excess"] == event["current"] - event["limit"] > 0
        assert event["reason"] == "over_its_cap"
    assert any(
        e["kind"] == "soft_warning" and 0.5 <= e["utilization_after"] <= 1 for w in warnings for e in w["events"]
    )
    assert [each["events"][0].get("allowed") for each in violations if each["policy"] == "strict"] == [False]
    error = refused.value.body
    assert isinstance(error, dict)
    assert {name: refusal[name] for name in error["weir"]} == error["weir"]


@pytest.mark.requirement("A0.138")
async def test_the_commands_show_check_and_find_what_was_changed(run: Run, tmp_path: Path) -> None:
    empty = await run.command("audit", "verify")
    assert (empty.exit_code, empty.stdout) == (0, "")
    await compacted(run)
    await run.command("keys", "create", "--name", "bot")
    named = json.loads((await run.command("audit", "list", NAME, "--json")).stdout)
    await run.ask("DELETE", f"conversations/{NAME}")
    rows = await run.rows()
    whole = await run.command("audit", "verify")
    assert whole.exit_code == 0, whole.output
    assert "operator" in whole.stdout
    chains = json.loads((await run.command("audit", "verify", "--json")).stdout)
    assert [(chain["first"], chain["broken"]) for chain in chains] == [(1, None)] * 2
    assert sum(chain["last"] for chain in chains) == len(rows)
    assert {chain["head"] for chain in chains} < {row.hash.hex() for row in rows}
    listed = json.loads((await run.command("audit", "list", rows[0].conversation, "--json")).stdout)
    assert [each["type"] for each in listed] == ["delete", *(each["type"] for each in named)]
    assert "eviction" in (await run.command("audit", "list", rows[0].conversation)).stdout
    connection = sqlite3.connect(run.database)
    connection.execute("UPDATE audit SET at = at - 60 WHERE seq = 2 AND tenant <> ''")
    connection.commit()
    connection.close()
    found = await run.command("audit", "verify")
    assert found.exit_code == 1
    assert "changed: " in found.stderr
    chains = json.loads((await run.command("audit", "verify", "--json")).stdout)
    assert [(chain["last"], chain["broken"]) for chain in chains] == [(1, None), (1, 2)]
    for name in ("verify", "list"):
        assert "Example:" in CliRunner().invoke(main, ["audit", name, "--help"]).stdout
