"""The rows on which other proxies are measured, played against Weir and against nothing:
docs/comparison.md.

    python -m benchmarks.peers [--peer 'COMMAND --port {port} --upstream {upstream} --window
    {window}'] [--row NAME]

With ``--peer`` also against another proxy, which is started anew for each row, with an empty
``{folder}`` of its own that outlasts a restart; ``{root}`` is the upstream without ``/v1``,
``{trigger}`` 70 % of the window, ``{summariser}`` the model that may write summaries.

A strict simulator with a window of 8,192 tokens is the upstream. The client resends its whole
history, every step adds about 450 tokens, and a request that is refused ends nothing: the next step
is asked all the same.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.functional.harness import (
    COUNTER,
    RunningWeir,
    Talk,
    answered,
    arrays_of,
    canonical,
    free_port,
    opening,
    prose,
    weir,
)
from tests.upstream import RunningSimulator, SimulatorSettings, serve_simulator

WINDOW = 8_192
SUMMARISER = "sim-summarizer"
FAILING = "fault:500"
STARTS_WITHIN = 120.0  # seconds
CACHED = 4  # newest requests whose prompts the provider's cache is taken to hold


@dataclass(slots=True)
class Played:
    """What became of a row's requests."""

    asked: int = 0
    answered: int = 0
    note: str = ""


class Counted(Talk):
    """A conversation whose refused requests are counted and not raised."""

    played: Played = Played()

    async def ask(self, messages: list[dict[str, Any]] | None = None, **options: Any) -> Any:
        self.played.asked += 1
        try:
            await super().ask(messages, **options)
            self.played.answered += 1
        except openai.APIStatusError as error:
            self.played.note = str(error.code or error.status_code)
        except openai.APIConnectionError as error:
            self.played.note = type(error).__name__


Row = Callable[["Way"], Awaitable[Played]]
New = Callable[..., Counted]
Work = Callable[[New], Awaitable[object]]


@dataclass(slots=True)
class Way:
    """The simulator, directly or behind a Weir whose database is ``store``, or behind another
    proxy's ``command``.
    """

    simulator: RunningSimulator
    folder: Path
    store: Path | None = None
    command: str | None = None

    def weir(self, **options: Any) -> AbstractAsyncContextManager[RunningWeir]:
        """A Weir in front of it."""
        return weir(self.simulator.base_url, self.store, **{"window": WINDOW, **options})

    async def play(self, work: Work, **options: Any) -> Played:
        """What ``work`` makes of a client."""
        played = Played()
        if self.store is None:
            async with self.peer(**options) as base_url:
                client = openai.AsyncOpenAI(
                    base_url=base_url, api_key="sk-test", max_retries=0, timeout=60
                )
                await work(lambda **more: talk(client, played, **more))
                await client.close()
            return played
        async with self.weir(**options) as target:
            await work(lambda **more: talk(target.client(), played, **more))
            await settled(target)
        return played

    @asynccontextmanager
    async def peer(
        self, *, window: int = WINDOW, summarizer: str = SUMMARISER
    ) -> AsyncIterator[str]:
        """Where the other proxy is reached while it runs; the simulator itself without one."""
        base_url = self.simulator.base_url
        if self.command is None:
            yield base_url
            return
        port = free_port()
        root = base_url.removesuffix("/v1")
        values = {
            "port": port,
            "upstream": base_url,
            "root": root,
            "window": window,
            "folder": self.folder,
        }
        values |= {"trigger": window * 7 // 10, "summariser": summarizer}
        command = shlex.split(self.command.format_map(values))
        with (self.folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, start_new_session=True
            )
        try:
            async with asyncio.timeout(STARTS_WITHIN):
                while not await connects(port):
                    if process.returncode is not None:
                        raise SystemExit((self.folder / "log").read_text(errors="replace"))
                    await asyncio.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await process.wait()

    def tell(self, played: Played) -> Played:
        """The same with calls of a summariser and the share of tokens that a prefix cache had."""
        arrays = arrays_of(answered(self.simulator))
        reuse = prefix_reuse(arrays)
        calls = len(self.simulator.answered()) - played.answered
        played.note = f"{calls} summariser calls, {reuse:.0%} prefix reuse"
        return played


async def connects(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def prefix_reuse(arrays: list[list[dict[str, Any]]]) -> float:
    """Tokens of the longest prefix that one of the newest requests before had too, over tokens
    forwarded.
    """
    digests = canonical(arrays)
    reused = total = 0
    for at, (array, mine) in enumerate(zip(arrays, digests, strict=True)):
        tokens = [COUNTER.count(json.dumps(message)) for message in array]
        total += sum(tokens)
        before = digests[max(0, at - CACHED) : at]
        common = max((common_length(mine, other) for other in before), default=0)
        reused += sum(tokens[:common])
    return reused / total if total else 0.0


def common_length(one: list[bytes], other: list[bytes]) -> int:
    """How many messages two arrays have in common at their beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def talk(client: Any, played: Played, **more: Any) -> Counted:
    """A conversation that counts into ``played``."""
    made = Counted(client, **more)
    made.played = played
    return made


async def settled(target: RunningWeir) -> None:
    """Return once everything is written."""
    await target.runtime.preparation.settled()
    await target.runtime.write_queue.flush()


async def agent_loop(way: Way) -> Played:
    return way.tell(await way.play(lambda new: new().agent(30)))


async def agent_loop_with_a_summariser(way: Way) -> Played:
    return way.tell(await way.play(lambda new: new().agent(30), summarizer=SUMMARISER))


async def chat(way: Way) -> Played:
    return way.tell(await way.play(lambda new: new().chat(30)))


async def restarted(way: Way) -> Played:
    kept: list[Counted] = []

    async def before(new: New) -> None:
        kept.append(new())
        await kept[0].agent(30)

    async def after(new: New) -> None:
        await new(messages=kept[0].messages, turns=kept[0].turns).agent(1)

    await way.play(before)
    return await way.play(after)


async def summariser_fails(way: Way) -> Played:
    return await way.play(lambda new: new().chat(20), summarizer=FAILING)


async def wrong_window(way: Way) -> Played:
    return await way.play(lambda new: new().agent(20), window=32_768)


async def twins(way: Way) -> Played:
    async def work(new: New) -> None:
        first = new()
        second = new(messages=[*opening()])
        second.turns = 100  # the same opening, other steps from then on
        for _ in range(24):
            await first.agent(1)
            await second.agent(1)

    return way.tell(await way.play(work))


async def oversized_result(way: Way) -> Played:
    async def work(new: New) -> None:
        one = new()
        one.add_step()
        one.messages[-1] = {**one.messages[-1], "content": prose(9_000, seed=3)}
        await one.ask()

    return await way.play(work)


async def task_stays(way: Way) -> Played:
    played = await way.play(lambda new: new().agent(30))
    last = next(iter(arrays_of(answered(way.simulator))[::-1]), [])
    played.note = "kept" if opening()[1] in last else "gone"
    return played


ROWS: tuple[tuple[str, Row], ...] = (
    ("agent loop, 30 steps", agent_loop),
    ("the same, a model writes summaries", agent_loop_with_a_summariser),
    ("chat, 30 turns", chat),
    ("first user message after 30 steps", task_stays),
    ("restart, then the next turn", restarted),
    ("summariser answers 500, 20 turns", summariser_fails),
    ("configured 32K, really 8K, 20 steps", wrong_window),
    ("two conversations begin alike, 48 requests", twins),
    ("newest tool result larger than the window", oversized_result),
)


async def main(arguments: argparse.Namespace) -> None:
    """Play every row each way."""
    ways = {
        "direct": {},
        "Weir": {"store": "w.db"},
        **({"peer": {"command": arguments.peer}} if arguments.peer else {}),
    }
    print(f"{'row':44}" + "".join(f"{name:>9}" for name in ways))
    for name, row in ROWS:
        if arguments.row and arguments.row not in name:
            continue
        cells = []
        for own in ways.values():
            settings = SimulatorSettings(window=WINDOW, summary_model=SUMMARISER)
            with tempfile.TemporaryDirectory() as data:
                async with serve_simulator(settings, counter=COUNTER) as simulator:
                    store = Path(data, own["store"]) if "store" in own else None
                    cells.append(await row(Way(simulator, Path(data), store, own.get("command"))))
        shown = "".join(f"{f'{each.answered}/{each.asked}':>9}" for each in cells)
        print(f"{name:44}{shown}  {cells[-1].note}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default="", help="the command of another proxy")
    parser.add_argument("--row", default="", help="rows whose name has this alone")
    asyncio.run(main(parser.parse_args()))
