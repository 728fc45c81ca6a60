"""What is done after an answer, what an operator asks for, and going on from a checkpoint, in a real Weir."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.memory.checkpoint import Checkpoint
from proxy.store.records import CheckpointRow, ConversationRow
from tests.functional.harness import (
    ALONE,
    COUNTER,
    SHARED,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    batches,
    opening,
    prose,
)
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

WINDOW = 8192


async def conversation(target: InTurns, talk: Talk) -> ConversationRow:
    """The row of a conversation, once everything after its answers is done."""
    await target.settled()
    row = await target.store.conversation(None, talk.headers[-1]["x-weir-conversation"])
    assert row is not None
    return row


async def checkpoints(target: InTurns, talk: Talk) -> list[CheckpointRow]:
    row = await conversation(target, talk)
    return await target.store.checkpoints(row)


async def control(target: InTurns, method: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10) as client:
        headers = {"authorization": "Bearer sk-test"}
        return await client.request(method, f"{target.root()}/weir/conversations/{path}", headers=headers, **options)


def summaries_in(simulator: RunningSimulator, model: str = "sim") -> list[str]:
    arrays = arrays_of(answered(simulator, model))
    texts = [m["content"] for a in arrays for m in a if m["role"] == "user" and "Written by Weir" in m["content"]]
    return list(dict.fromkeys(texts))


@pytest.mark.requirement("A2.11", "D14")
async def test_the_request_at_the_trigger_waits_for_no_model_because_its_summary_is_there(
    deployment: Deployment,
) -> None:
    settings = SimulatorSettings(window=WINDOW, summary_model="summariser", latency=0.0)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, summarizer="summariser") as target,
    ):
        talk = Talk(target.client(), opening())
        for _ in range(30):
            before = len(answered(simulator, "summariser"))
            talk.add_question()
            await talk.ask()
            during = len(answered(simulator, "summariser"))
            await target.settled()
            talk.add_answer()
            if talk.actions()[-1] == "compact=1":
                break
        else:
            pytest.fail("no batch came")
        made = summaries_in(simulator)
    assert during == before
    assert before == 1
    assert "Next step: go on from" in made[0]


YAML = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: '*', upstream: sim, window: 8192}]
policies: {mine: POLICY}
default_policy: mine
store: {url: 'sqlite+aiosqlite:///DB'}
"""


def yaml_with(policy: str, simulator: RunningSimulator, database: Path) -> str:
    """A configuration with one policy."""
    return YAML.replace("URL", simulator.base_url).replace("DB", str(database)).replace("POLICY", policy)


@SHARED
@pytest.mark.requirement("D23", "A0.111", "P9")
async def test_rising_over_the_mark_saves_one_version(tmp_path: Path, deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        text = yaml_with("{checkpoints: {save_at: 0.6}}", simulator, tmp_path / "w.db")
        async with deployment.serving(simulator.base_url, yaml=text, folder=tmp_path, window=None) as target:
            talk, pressure = Talk(target.client(), opening()), 0.0
            while pressure <= 0.6:
                assert await _saved(target, talk) == []
                await talk.chat(1)
                pressure = float(talk.headers[-1]["x-weir-pressure"].split(";")[0])
            saved = await checkpoints(target, talk)
            await talk.ask(talk.messages[:-1])
            again = await checkpoints(target, talk)
    assert [row.reason for row in saved] == [row.reason for row in again] == ["safety"]
    assert saved[0].cut is None


async def _saved(target: InTurns, talk: Talk) -> list[str]:
    return [row.reason for row in await checkpoints(target, talk)] if talk.headers else []


@pytest.mark.requirement("A0.113", "A0.102", "A0.5")
async def test_a_new_conversation_goes_on_from_the_checkpoint_of_a_named_one(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url) as target,
    ):
        named = {"x-weir-conversation": "migration-7"}
        first = Talk(target.client(default_headers=named), opening())
        first.messages.append({"role": "assistant", "content": "I decided to use fetch because axios is unmaintained."})
        first.grow(8)
        while "compact" not in first.actions()[-1] if first.headers else True:
            await first.chat(1)
        await conversation(target, first)
        resumed = {"x-weir-resume": "migration-7", "x-weir-conversation": "migration-8"}
        second = Talk(target.client(default_headers=resumed), [{"role": "user", "content": "Go on where you stopped."}])
        await second.ask()
        sent = arrays_of(answered(simulator))[-1]
        await conversation(target, second)
        second.messages.append({"role": "assistant", "content": "I go on."})
        await second.chat(1)
        again = arrays_of(answered(simulator))[-1]
        stranger = Talk(
            target.client(key="sk-other", default_headers=resumed),
            [{"role": "user", "content": "Go on where you stopped."}],
        )
        await stranger.ask()
        foreign = arrays_of(answered(simulator))[-1]
    assert len(sent) == 2
    assert "Resuming from checkpoint" in sent[0]["content"]
    assert "Migrate the project from axios to fetch." in sent[0]["content"]
    assert sent[1] == {"role": "user", "content": "Go on where you stopped."}
    assert again[:2] == sent
    assert second.actions()[0] == "resume=1"
    assert foreign == [{"role": "user", "content": "Go on where you stopped."}]
    assert "degraded=resume" in stranger.actions()[0]


@pytest.mark.requirement("A0.113", "P9")
async def test_where_the_policy_says_so_a_name_that_begins_anew_resumes_by_itself(
    tmp_path: Path, deployment: Deployment
) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        text = yaml_with("{resume: auto}", simulator, tmp_path / "w.db")
        async with deployment.serving(simulator.base_url, yaml=text, folder=tmp_path, window=None) as target:
            named = {"x-weir-conversation": "agent-1"}
            first = Talk(target.client(default_headers=named), opening())
            first.grow(12)
            await first.chat(3)
            await conversation(target, first)
            assert await checkpoints(target, first)
            second = Talk(target.client(default_headers=named), opening(seed=9))
            await second.ask()
            sent = arrays_of(answered(simulator))[-1]
    assert "Resuming from checkpoint" in sent[1]["content"]
    assert [m["role"] for m in sent] == ["system", "user", "user"]


@pytest.mark.requirement("A0.59", "S.25")
async def test_an_operator_has_a_conversation_compacted_whatever_its_size(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=32_000), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=32_000) as target,
    ):
        talk = Talk(target.client(), opening())
        talk.grow(20, kind="agent")
        await talk.chat(1)
        row = await conversation(target, talk)
        asked = await control(target, "POST", f"{row.id}/compact")
        await talk.chat(2)
        await conversation(target, talk)
    assert asked.status_code == 202
    assert talk.actions() == ["none", "compact=1", "compact=1"]
    before, after = (int(part.split("=")[1]) for part in talk.headers[1]["x-weir-tokens"].split(";")[:2])
    assert before > 1.7 * after, "the client is told that and how far it was compacted"
    assert len(summaries_in(simulator)) == 1


@pytest.mark.requirement("A2.20", "P8")
async def test_a_rollback_gives_the_history_back_and_a_pin_keeps_a_message(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=32_000), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=32_000) as target,
    ):
        talk = Talk(target.client(), opening())
        talk.grow(20)
        await talk.chat(1)
        row = await conversation(target, talk)
        await control(target, "POST", f"{row.id}/compact")
        await talk.chat(1)
        await conversation(target, talk)
        removed = (await control(target, "GET", f"{row.id}/removed")).json()["data"]
        lost = next(m for m in removed if m["role"] == "user")
        pinned = await control(target, "POST", f"{row.id}/pin", json={"ref": lost["ref"]})
        await talk.chat(1)
        with_pin = arrays_of(answered(simulator))[-1]
        back = await control(target, "POST", f"{row.id}/rollback/0")
        await talk.chat(1)
        whole = arrays_of(answered(simulator))[-1]
    assert pinned.status_code == 200
    assert any(m["content"].startswith(lost["begins"][:60]) for m in with_pin)
    assert back.status_code == 200
    assert len(whole) == len(talk.messages) - 1


def user(words: int, *, seed: int) -> dict[str, Any]:
    return {"role": "user", "content": prose(words, seed=seed)}


@ALONE
@pytest.mark.requirement("P1", "D25", "A2.20")
@pytest.mark.parametrize("kind", ["chat", "agent"])
@pytest.mark.parametrize("size", [2_500, 3_600])
async def test_what_a_huge_message_drove_out_is_back_once_that_is_another_one(
    kind: str, size: int, deployment: Deployment
) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url) as target,
    ):
        talk = Talk(target.client(), opening())
        talk.grow(6, kind=kind)
        await talk.chat(1)
        before = talk.messages.copy()
        await talk.ask([*before, user(size, seed=1)])
        assert "compact=1" in talk.actions()[-1], "the message takes the room of the others"
        talk.messages.append(user(40, seed=2))
        await talk.ask()
        assert arrays_of(answered(simulator))[-1] == talk.messages
        assert talk.actions()[-1] == "none"
        talk.add_answer()
        await talk.chat(3)
        row = await conversation(target, talk)
        audited = (await control(target, "GET", f"{row.id}/audit?limit=200")).json()["events"]
        requests = await target.store.timeline(row, limit=10)
    assert batches(arrays_of(answered(simulator))[-4:]) == 0
    assert [each["facts"]["batches"] for each in audited if each["type"] == "rollback"] == [1]
    told = [event for each in requests for event in each.detail.get("events", ()) if event["kind"] == "rollback"]
    assert [event["count"] >= 1 for event in told] == [True]


@SHARED
@pytest.mark.requirement("A0.133", "A0.136", "A0.148", "A0.146")
async def test_a_long_task_goes_through_every_phase_from_its_resumption_to_its_archive(
    tmp_path: Path, deployment: Deployment
) -> None:
    policy = (
        "{zones: {yellow_at: 0.5, orange_at: 0.6, red_at: 0.75, critical_at: 0.9}, checkpoints: {save_at: 0.4}, "
        "cascade: [{layer: evict, at: 0.6, stop_at: 0.5, min_savings: 0.02, params: {scorer: fifo}}, "
        "{layer: compact, at: 0.8, stop_at: 0.5}, {layer: rollover, at: 0.9}]}"
    )
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        text = yaml_with(policy, simulator, tmp_path / "w.db")
        async with deployment.serving(simulator.base_url, yaml=text, folder=tmp_path, window=None) as target:
            before = Talk(target.client(default_headers={"x-weir-conversation": "monday"}), opening())
            before.grow(6)
            await before.chat(3)
            assert await checkpoints(target, before), "nothing to go on from"
            headers = {"x-weir-conversation": "tuesday", "x-weir-resume": "monday"}
            task = Talk(target.client(default_headers=headers), [{"role": "user", "content": "Go on, please."}], seed=3)
            for _ in range(9):
                await task.agent(1)
                await target.settled()
            task.messages.append({"role": "user", "content": "Why so? " + "Tell me more about it. " * 480})
            await task.ask()
            task.add_answer()
            for _ in range(12):
                await task.chat(1)
            await target.settled()
            timeline = (await control(target, "GET", "tuesday/timeline?limit=200")).json()["data"]
            report = (await control(target, "GET", "tuesday")).json()
            closed = await control(target, "POST", "tuesday/close")
            saved = await checkpoints(target, task)
    phases = {row["action"] for row in timeline}
    assert "resume=1" in task.actions()[0]
    assert {"none", "evaluate", "evict_and_compress"} <= phases
    assert report["windows_created"] > 1
    assert closed.status_code == 200
    assert {row.reason for row in saved} >= {"resume", "compaction", "closed"}
    assert saved[-1].reason == "closed"
    assert [row.version for row in saved] == sorted({row.version for row in saved})


@pytest.mark.requirement("R.9", "R.74")
async def test_a_client_that_leaves_while_its_history_is_summarised_leaves_a_whole_checkpoint_or_none(
    deployment: Deployment,
) -> None:
    settings = SimulatorSettings(window=WINDOW, summary_model="summariser", summary_seconds=0.4)
    waiting = {"summaries": {"wait": 20}}
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, summarizer="summariser", balanced=waiting) as target,
    ):
        for number in range(4):
            talk = Talk(target.client(), opening(seed=50 + number), seed=number)
            talk.grow(16)
            talk.add_question()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(talk.ask(), 0.15 + 0.05 * number)
        await asyncio.sleep(0.8)
        await target.settled()
        store = target.store
        rows = [row for each in await store.conversations(None) for row in await store.checkpoints(each)]
        assert store.damaged == 0
        for row in rows:
            assert Checkpoint.from_json(row.body).validate().valid
        talk = Talk(target.client(), opening(seed=50), seed=0)
        talk.grow(16)
        await talk.chat(1)
    assert "compact=1" in talk.actions()[0]


@pytest.mark.requirement("A0.60", "P7")
async def test_of_conversations_that_begin_alike_each_has_its_own_notes(deployment: Deployment) -> None:
    """Two customers who say hello with one key: what was noted of the first is not told of the second."""
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url) as target,
    ):
        begun = Talk(target.client(), opening())
        await begun.ask()
        for name in ("anna", "berta"):
            talk = Talk(target.client(), [*begun.messages])
            for turns in (14, 14):
                talk.grow(turns)
                await talk.chat(2)
                text = f"```note\nThe customer {name} lives at 7 {name}-street.\n```\nNoted."
                talk.messages[-1] = {"role": "assistant", "content": text}
                await talk.chat(1)
                await target.settled()
            (made,) = summaries_in(simulator)[-1:]
            seen = arrays_of(answered(simulator))[-1]
            assert f"The customer {name} lives at" in made
            assert name == "anna" or "anna" not in str(seen)


@ALONE
@pytest.mark.requirement("A0.60", "A0.61", "A0.62")
async def test_a_model_takes_notes_in_the_background_once_a_conversation_is_long(
    tmp_path: Path, deployment: Deployment
) -> None:
    settings = SimulatorSettings(window=32_000, summary_model="summariser")
    policy = "{summarizer: summariser, notes: {extract_from: 20}}"
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        text = yaml_with(policy, simulator, tmp_path / "w.db").replace("8192", "32000")
        async with deployment.serving(simulator.base_url, yaml=text, folder=tmp_path, window=None) as target:
            talk = Talk(target.client(default_headers={"x-weir-conversation": "noted"}), opening())
            for _ in range(9):
                await talk.agent(1)
                await target.settled()
            early = len(answered(simulator, "summariser"))
            for _ in range(14):
                await talk.agent(1)
                await target.settled()
            late = len(answered(simulator, "summariser"))
            await target.settled()
            notes = (await control(target, "GET", "noted/notes")).json()["data"]
    assert early == 0
    assert late == 1
    assert notes
    assert {note["source"] for note in notes} == {"model"}
    assert all(any(c.isdigit() or c in "/._" for c in note["text"]) for note in notes), "no note without an identifier"


@pytest.mark.requirement("D12", "A3.9", "S.20")
@pytest.mark.parametrize("role", ["user", "system", "system_append"])
async def test_a_summary_stands_where_the_policy_says_and_the_system_prompt_keeps_its_bytes(
    role: str, tmp_path: Path, deployment: Deployment
) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        text = yaml_with(f"{{summaries: {{role: {role}}}}}", simulator, tmp_path / "w.db")
        async with deployment.serving(simulator.base_url, yaml=text, folder=tmp_path, window=None) as target:
            talk = Talk(target.client(), opening())
            talk.grow(16)
            await talk.chat(2)
            first, second = arrays_of(answered(simulator))
    assert talk.actions() == ["compact=1"] * 2
    assert second[: len(first)] == first
    held = [n for n, m in enumerate(first) if "Written by Weir" in m["content"]]
    assert len(held) == 1
    if role == "system_append":
        assert held == [0]
        assert first[0]["content"].startswith(talk.messages[0]["content"])
    else:
        assert first[0] == talk.messages[0]
        assert first[held[0]]["role"] == role
        assert first[held[0] - 1] == talk.messages[1]
