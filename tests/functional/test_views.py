"""What is decided for one window, and what a client moves through its history: seen in the forwarded arrays."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.conversation import book
from tests.functional.harness import (
    ALONE,
    COUNTER,
    EITHER,
    Deployment,
    Talk,
    answered,
    arrays_of,
    batches,
    opening,
    prefix_reuse,
    prose,
    ruled,
    tool_step,
    weir,
)
from tests.profile import soak
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

Messages = list[dict[str, Any]]
MODELS = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: large, window: 65536}, {match: middle, window: 32768}, {match: small, window: 8192}]
"""
NOTE = "[Author's note: keep answers short and in the past tense.]"


def configured(simulator: RunningSimulator) -> str:
    return MODELS.replace("URL", simulator.base_url)


def spoken(turns: int, *, seed: int = 1, words: int = 220) -> Messages:
    """A chat that ends with a user's message."""
    said = opening(seed=seed)
    for turn in range(turns):
        said.append({"role": "assistant", "content": prose(words, seed=1000 * seed + turn)})
        said.append({"role": "user", "content": prose(words, seed=1000 * seed + 500 + turn)})
    return said


def worked(steps: int, *, seed: int = 1) -> Messages:
    """An agent's history that ends with a tool's result."""
    said = opening(seed=seed)
    for step in range(steps):
        said += tool_step(1000 * seed + step)
    return said


async def sent(talk: Talk, simulator: RunningSimulator, messages: Messages, model: str) -> Messages:
    """What was forwarded of one request."""
    await talk.ask(messages, model=model)
    return arrays_of(simulator.answered()[-1:])[0]


@EITHER
@pytest.mark.requirement("P1", "P2")
@pytest.mark.parametrize("name", [None, "main"], ids=["unnamed", "named"])
async def test_what_was_decided_for_a_small_window_is_not_sent_to_a_large_one(
    deployment: Deployment, name: str | None, tmp_path: Path
) -> None:
    """Side requests and switches both ways, also over a restart; one that fits goes up as it came."""
    messages = spoken(20)
    async with serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator:
        options = {"yaml": configured(simulator), "folder": tmp_path, "window": None}
        for _ in range(2):
            async with deployment.serving(simulator.base_url, **options) as target:
                headers = {"x-weir-conversation": name} if name else {}
                talk = Talk(target.client(default_headers=headers), messages, model="large")
                for model in ("large", "small", "large", "middle", "small", "large"):
                    forwarded = await sent(talk, simulator, messages, model)
                    assert (forwarded == messages) == (model != "small"), model
                assert len({h["x-weir-conversation"] for h in talk.headers}) == 1
                smaller = [arrays_of([each])[0] for each in answered(simulator, "small")]
                assert all(each == smaller[0] for each in smaller), "the small window has one batch, and keeps it"
                await target.settled()


def at_depth(depth: int, *notes: dict[str, str]) -> Callable[[Messages, int], Messages]:
    return lambda messages, _: [
        *messages[: max(1, len(messages) - depth)],
        *notes,
        *messages[max(1, len(messages) - depth) :],
    ]


def with_time(role: str) -> Callable[[Messages, int], Messages]:
    """A message that says something else each time, six messages before the end."""
    return lambda messages, turn: at_depth(6, {"role": role, "content": f"The time is {turn} minutes past noon."})(
        messages, turn
    )


def with_lore(messages: Messages, turn: int) -> Messages:
    """An entry that is inserted in the middle for four turns in each ten."""
    return at_depth(5, {"role": "system", "content": NOTE})(messages, turn) if turn % 10 < 4 else messages


SYSTEM, USER = ({"role": role, "content": NOTE} for role in ("system", "user"))
MOVING: dict[str, Callable[[Messages, int], Messages]] = {
    **{f"a system message {n} before the end": at_depth(n, SYSTEM) for n in (0, 2, 4, 7, 10)},
    **{f"a user message {n} before the end": at_depth(n, USER) for n in (0, 4, 10)},
    "files in front of the newest message": at_depth(1, USER, {"role": "assistant", "content": "Ok."}),
    "two notes at two depths": lambda messages, turn: at_depth(3, {"role": "system", "content": "Stay in character."})(
        at_depth(8, SYSTEM)(messages, turn), turn
    ),
    "a text that changes": with_time("system"),
    "a user's text that changes": with_time("user"),
    "lore for some turns": with_lore,
}
OF_AGENTS = ("a user message 0 before the end", "a user's text that changes")
ORDINARY = ("a system message 4 before the end", "a user message 10 before the end", "two notes at two depths")
MOVED = [
    *[pytest.param(each, spoken, id=each, marks=() if each in ORDINARY else soak) for each in MOVING],
    *[pytest.param(each, worked, id=f"{each} of an agent's") for each in OF_AGENTS],
]


@ALONE
@pytest.mark.requirement("P1", "P2")
@pytest.mark.parametrize(("moved", "makes"), MOVED)
async def test_what_the_client_moves_makes_no_batches_of_its_own(
    deployment: Deployment, moved: str, makes: Callable[..., Messages], tmp_path: Path
) -> None:
    """As many batches as without, in one conversation, and it is in each request as often as the client has it."""
    turns = 36
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        options = {"yaml": configured(simulator), "folder": tmp_path, "window": None}
        async with deployment.serving(simulator.base_url, **options) as target:
            found = {}
            for name, moves in (("plain", None), ("moved", MOVING[moved])):
                talk, forwarded = Talk(target.client(), [], model="small"), list[Messages]()
                for turn in range(turns):
                    messages = makes(turn, seed=2 if moves else 1)
                    messages = moves(messages, turn) if moves else messages
                    forwarded.append(await sent(talk, simulator, messages, "small"))
                    assert forwarded[-1].count(SYSTEM) == messages.count(SYSTEM)
                found[name] = forwarded
                names = {h["x-weir-conversation"] for h in talk.headers}
                assert len(names) <= 4, "what a history begins with has to be seen before it can be known again"
    assert rewritten(found["moved"]) <= rewritten(found["plain"]) + 1
    assert reuse(found["moved"]) >= reuse(found["plain"]) - 0.02


def history(array: Messages) -> Messages:
    """Without the head, and without what the client moves."""
    moving = {NOTE, "Ok.", "Stay in character."}
    return [m for m in array[1:] if m["content"] not in moving and "The time is" not in str(m["content"])]


def rewritten(arrays: Sequence[Messages]) -> int:
    """Requests whose history does not begin with that of the one before."""
    histories = [history(array) for array in arrays]
    return sum(new[: len(old)] != old for old, new in pairwise(histories))


def reuse(arrays: Sequence[Messages]) -> float:
    return prefix_reuse([history(array) for array in arrays], lambda m: COUNTER.count(str(m["content"])))


KEY = {"authorization": "Bearer sk-test"}
CLIENTS: dict[str, dict[str, str]] = {"first": {"x-weir-conversation": "first"}, "second": {"x-session-id": "second"}}


@EITHER
@pytest.mark.requirement("P1", "P9")
async def test_a_name_is_found_at_once_holds_its_own_requests_and_goes_alone(deployment: Deployment) -> None:
    """Named and unnamed clients with the same words, past a batch, over ``kill -9``, and one of them deleted."""
    clients = {"": {}, **CLIENTS}
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.started("--upstream", simulator.base_url, "--window", "8192") as target,
    ):
        echoed = {}
        for turn in range(0, 18, 2):
            for name, headers in clients.items():
                talk = Talk(target.client(default_headers=headers), spoken(turn), model="sim")
                await talk.ask()
                said = talk.headers[-1]["x-weir-conversation"]
                assert said == echoed.setdefault(name, said)
                assert name in ("", said)
                assert await status_of(target.root(), said) == 200
        assert len(set(echoed.values())) == 3
        for _ in range(2):  # each process stores what it has answered before it is asked
            await requests_of(target.root(), "first")
        await target.crash()
        requests = {name: await requests_of(target.root(), said) for name, said in echoed.items()}
        assert requests == dict.fromkeys(echoed, 9)
        assert await status_of(target.root(), "first", method="DELETE") == 200
        assert await status_of(target.root(), "first") == 404
        assert {n: await requests_of(target.root(), s) for n, s in echoed.items() if n != "first"} == {
            "": 9,
            "second": 9,
        }


async def status_of(root: str, name: str, *, method: str = "GET") -> int:
    async with httpx.AsyncClient(base_url=root, headers=KEY) as client:
        return (await client.request(method, f"/weir/conversations/{name}")).status_code


async def requests_of(root: str, name: str) -> int:
    async with httpx.AsyncClient(base_url=root, headers=KEY) as client:
        return int((await client.get(f"/weir/conversations/{name}")).json()["requests"])


@pytest.mark.requirement("P1")
async def test_the_id_that_weir_gave_continues_its_conversation_as_a_name(tmp_path: Path) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=8192) as target,
    ):
        talk = Talk(target.client(), spoken(14), model="sim")
        before = await sent(talk, simulator, talk.messages, "sim")
        given = talk.headers[-1]["x-weir-conversation"]
        named = Talk(target.client(default_headers={"x-weir-conversation": given}), [], model="sim")
        goes_on = [*talk.messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        after = await sent(named, simulator, goes_on, "sim")
        assert talk.actions() == ["compact=1"]
        assert after[: len(before)] == before
        assert named.headers[-1]["x-weir-conversation"] == given
        assert await requests_of(target.root, given) == 2


@pytest.mark.requirement("P2")
async def test_answers_of_other_sizes_need_no_other_window(tmp_path: Path) -> None:
    """Where a policy makes the window a multiple of the answer, which the client asks for in another size each time."""
    rules = {"match": "sim", "window": 65_536}
    async with serve_simulator(SimulatorSettings(window=65_536), counter=COUNTER) as simulator:
        yaml = ruled(simulator.base_url, {"window_per_output": 8}).replace("window: 8192", f"models: [{rules}]")
        async with weir(simulator.base_url, yaml=yaml, folder=tmp_path, window=None) as target:
            talk = Talk(target.client(), [], model="sim")
            for turn in range(16):
                await talk.ask(spoken(30 + turn), max_tokens=1_400 + 37 * (turn * 7 % 11))
    assert batches(arrays_of(simulator.answered())) <= 3


async def test_a_view_that_memory_has_no_room_for_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_VIEWS", 1)
    async with (
        serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator,
        weir("", tmp_path / "w.db", yaml=configured(simulator), folder=tmp_path, window=None) as target,
    ):
        talk = Talk(target.client(default_headers={"x-weir-conversation": "one"}), spoken(60))
        before = await sent(talk, simulator, talk.messages, "small")
        await sent(talk, simulator, talk.messages, "large")
        talk.messages += spoken(2, seed=3)[2:]
        assert (await sent(talk, simulator, talk.messages, "small"))[: len(before)] == before
