"""Asking a model for notes: what is asked once, what is kept, what is left alone, and what it may take."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import pytest

from policies.effects import Failed, Summarize, Summary
from proxy.effects.summarizer import (
    AT_ONCE,
    BACK_OFF_AFTER,
    BACK_OFF_FIRST,
    LEARNED_FOR,
    MAX_CHARACTERS,
    MAX_KEPT,
    Summarizer,
    SummarizerTerms,
    SummaryCache,
    SummaryResult,
)
from proxy.errors import UpstreamUnreachable
from proxy.store import Store
from proxy.store.records import StoreUnavailable, SummaryRow

TERMS = SummarizerTerms(tenant="a", upstream="up", model="small")
NOTES = "The service was moved to port 8400 and the tests pass; next is the release."
QUESTION = Summarize("You take notes.", "material\n\nTake notes.", 200, "structured-2", key="history-1")
UNKEYED = replace(QUESTION, key="")
SCHEMA = replace(QUESTION, schema={"type": "object"})
NO_SCHEMA = {"error": {"message": "response_format is not supported", "code": None, "param": "response_format"}}


def answer(text: str = NOTES, **more: Any) -> bytes:
    """A completion that says ``text``."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": more.pop("finish", "stop")}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 60}}
    return json.dumps({"model": "small-1", "choices": [choice], "usage": usage, **more}).encode()


@dataclass(slots=True)
class Model:
    """A summariser: the bodies that it was sent, and what it answers to each; the last answer goes on."""

    answers: Sequence[tuple[int, bytes] | Exception] = ((200, answer()),)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, body: bytes) -> tuple[int, bytes]:
        self.bodies.append(json.loads(body))
        self.entered.set()
        found = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(found, Exception):
            raise found
        return found


@dataclass(slots=True)
class Clock:
    """A clock that stands until it is moved."""

    at: float = 1_000.0

    def __call__(self) -> float:
        return self.at


@asynccontextmanager
async def summarizing(**options: Any) -> AsyncIterator[Summarizer]:
    """A summarizer that is closed in the end."""
    summarizer = Summarizer(**options)
    try:
        yield summarizer
    finally:
        await summarizer.close()


def said(told: SummaryResult) -> str:
    """The text of a reply, or why there is none."""
    return told.reply.text if isinstance(told.reply, Summary) else f"! {told.reply.reason}"


# What is asked once


# What is kept


@pytest.mark.requirement("R.52")
@pytest.mark.parametrize(
    "useless",
    [
        (200, answer("")),
        (200, answer(" \n ")),
        (200, answer(NOTES, finish="length")),
        (200, answer("I'm sorry, but I can't help with summarizing this conversation.")),
        (200, answer("Error 503: service unavailable")),
        (200, b"\xff\xfe{"),
        (200, b'{"choices": []}'),
        (200, answer()[:-20]),
        (500, b"{}"),
        UpstreamUnreachable("gone"),
        OSError("gone"),
    ],
)
async def test_what_is_no_whole_answer_is_not_kept(useless: tuple[int, bytes] | Exception) -> None:
    model = Model((useless, (200, answer())))
    async with summarizing() as summarizer:
        first = await summarizer.ask(QUESTION, terms=TERMS, send=model)
        second = await summarizer.ask(QUESTION, terms=TERMS, send=model)
    assert first.source == second.source == "asked"
    assert isinstance(first.reply, Failed) or said(first) != NOTES or first.reply.finish_reason == "length"
    assert said(second) == NOTES


class BrokenStore:
    """A store that always fails."""

    shared = False

    async def summary(self, tenant: str, key: bytes) -> SummaryRow | None:
        raise StoreUnavailable(f"{tenant} {key!r}")

    async def keep_summary(self, tenant: str, row: SummaryRow) -> None:
        raise StoreUnavailable(f"{tenant} {row}")


@pytest.mark.requirement("P6", "P13")
async def test_a_store_that_fails_costs_no_answer_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING, logger="weir"):
        async with summarizing(store=cast("Store", BrokenStore())) as summarizer:
            for number in range(3):
                question = replace(QUESTION, key=f"history-{number}")
                assert said(await summarizer.ask(question, terms=TERMS, send=model)) == NOTES
            assert (await summarizer.ask(QUESTION, terms=TERMS, send=model)).source == "kept"
    assert len(caplog.records) == 1
    assert NOTES not in caplog.text


async def test_kept_answers_are_bounded_in_number_and_in_characters_and_can_be_forgotten() -> None:
    kept = SummaryCache()

    def row(number: int, text: str) -> SummaryRow:
        key = number.to_bytes(16, "big")
        return SummaryRow(key=key, at=0, purpose="p", model="m", tokens_in=1, tokens_out=1, text=text)

    for number in range(MAX_KEPT + 1):
        kept.keep("a", row(number, "x"))
    assert kept.remembered("a", (0).to_bytes(16, "big")) is None
    assert kept.remembered("a", (1).to_bytes(16, "big")) is not None
    kept.keep("a", row(10_000, "x" * (MAX_CHARACTERS - MAX_CHARACTERS // MAX_KEPT)))
    assert kept.remembered("a", (MAX_KEPT).to_bytes(16, "big")) is None
    assert kept.remembered("a", (1).to_bytes(16, "big")) is not None, "it was used last"
    kept.keep("b", row(10_001, "xx"))
    assert kept.remembered("a", (10_000).to_bytes(16, "big")) is None
    assert kept.remembered("b", (10_001).to_bytes(16, "big")) is not None
    kept.forget("b")
    assert kept.remembered("b", (10_001).to_bytes(16, "big")) is None


# What is left alone


@pytest.mark.requirement("R.50", "R.59")
async def test_a_failing_key_of_one_tenant_stops_no_other_tenant_and_no_other_model() -> None:
    failing, working = Model(((401, b"{}"),)), Model()
    async with summarizing() as summarizer:
        for _ in range(BACK_OFF_AFTER + 1):
            told = await summarizer.ask(UNKEYED, terms=TERMS, send=failing)
        assert said(told) == "! backing_off"
        for terms in (
            msgspec.structs.replace(TERMS, tenant="b"),
            msgspec.structs.replace(TERMS, upstream="other"),
            msgspec.structs.replace(TERMS, model="other"),
        ):
            assert said(await summarizer.ask(UNKEYED, terms=terms, send=working)) == NOTES


async def test_calls_that_fail_together_count_as_one_outage_and_only_so_many_are_made_at_a_time() -> None:
    clock, model = Clock(), Model(((503, b"{}"),), gate=asyncio.Event())
    async with summarizing(clock=clock) as summarizer:
        questions = [replace(UNKEYED, prompt=f"part {number}") for number in range(32)]
        waiting = [asyncio.create_task(summarizer.ask(q, terms=TERMS, send=model)) for q in questions]
        await model.entered.wait()
        await asyncio.sleep(0.01)
        assert len(model.bodies) == AT_ONCE
        assert model.gate is not None
        model.gate.set()
        told = [said(each) for each in await asyncio.gather(*waiting)]
        assert len(model.bodies) <= AT_ONCE + BACK_OFF_AFTER
        assert told.count("! backing_off") == 32 - len(model.bodies)
        clock.at += BACK_OFF_FIRST
        model.answers = ((200, answer()),)
        assert said(await summarizer.ask(UNKEYED, terms=TERMS, send=model)) == NOTES


# What it is asked for


@pytest.mark.requirement("P13")
@pytest.mark.parametrize("status", [400, 422])
async def test_a_model_that_refuses_the_schema_is_asked_without_it_for_an_hour(status: int) -> None:
    clock, model = Clock(), Model(((status, json.dumps(NO_SCHEMA).encode()), (200, answer())))
    async with summarizing(clock=clock) as summarizer:

        async def ask(question: Summarize, **terms: str) -> str:
            return said(await summarizer.ask(question, terms=msgspec.structs.replace(TERMS, **terms), send=model))  # type: ignore[arg-type]

        assert [await ask(SCHEMA), await ask(SCHEMA)] == ["! no_schema"] * 2
        assert len(model.bodies) == 1
        assert await ask(UNKEYED) == NOTES
        assert await ask(SCHEMA, model="other") == NOTES
        clock.at += LEARNED_FOR - 1
        assert await ask(SCHEMA) == "! no_schema"
        clock.at += 1
        assert await ask(SCHEMA) == NOTES
    form = model.bodies[0]["response_format"]
    assert (form["type"], form["json_schema"]["strict"]) == ("json_schema", True)
    assert form["json_schema"]["schema"] == {"type": "object"}
    assert "response_format" not in model.bodies[1]


@pytest.mark.requirement("P13")
@pytest.mark.parametrize("text", ["Notes in words that are no JSON at all.", "{ }", "```json\n{}\n```", ""])
async def test_a_model_that_fills_in_no_schema_is_not_asked_by_one_again(text: str) -> None:
    clock, model = Clock(), Model(((200, answer(text)), (200, answer())))
    async with summarizing(clock=clock) as summarizer:

        async def ask(**terms: str) -> str:
            question = replace(SCHEMA, key="")
            return said(await summarizer.ask(question, terms=msgspec.structs.replace(TERMS, **terms), send=model))  # type: ignore[arg-type]

        await ask()
        assert [await ask(), await ask(tenant="b")] == ["! no_schema"] * 2
        assert len(model.bodies) == 1
        await ask(upstream="elsewhere")
        clock.at += LEARNED_FOR
        await ask()
    assert len(model.bodies) == 3


@pytest.mark.requirement("P13")
@pytest.mark.parametrize(
    "text", ['{"goal": "to move"}', '```json\n{"goal": "to move"}\n```', "I'm sorry, I can't do that."]
)
async def test_a_model_that_fills_in_the_schema_or_declines_is_asked_by_it_again(text: str) -> None:
    model = Model(((200, answer(text)),))
    async with summarizing() as summarizer:
        for _ in range(2):
            await summarizer.ask(replace(SCHEMA, key=""), terms=TERMS, send=model)
    assert len(model.bodies) == 2


@pytest.mark.requirement("S.23", "P13")
async def test_a_question_of_its_own_has_no_tools_and_no_stream() -> None:
    model = Model()
    async with summarizing() as summarizer:
        await summarizer.ask(QUESTION, terms=TERMS, send=model)
    (body,) = model.bodies
    assert body.keys() == {"model", "messages", "max_tokens", "stream", "temperature"}
    assert (body["model"], body["stream"]) == ("small", False)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


# The end
