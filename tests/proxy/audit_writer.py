"""Processes that commit to one store at the same time, or until they are killed, for tests/proxy/test_audit.py.

``many URL BRANCH COUNT`` commits as one of several servers; ``killed PATH ROUNDS`` forks a writer per round, kills it
with SIGKILL at a random moment and prints how many commits were acknowledged.
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import msgspec

from proxy.store import Store
from tests.proxy.store_rows import change, eviction, exchange, url

PART = 20


async def many(address: str, branch: str, count: int) -> None:
    """Commit ``count`` batches on a branch of its own, and an exchange with each fourth, a part whenever told to."""
    store = await Store.open(address, busy_timeout=20)
    for number in range(count):
        if number % PART == 0:  # else the first to get the lock might keep it to its end
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        given = change(number, branch=branch, conversation=branch, count=1, with_cut=number % 2 == 0)
        await store.commit(msgspec.structs.replace(given, evictions=(eviction(number),)))
        if number % 4 == 0:
            refused = msgspec.structs.replace(
                exchange(number, branch=branch, conversation=branch), outcome="context_length_exceeded"
            )
            await store.record([refused])
    await store.close()


async def write_on(path: Path, acknowledge: int) -> None:
    """Commit for ever, and say each version once it is acknowledged."""
    store = await Store.open(url(path))
    branch = await store.branch("tenant-a", "b1")
    version = branch.version if branch else 0
    while True:
        version = await store.commit(msgspec.structs.replace(change(version), evictions=(eviction(version),)))
        os.write(acknowledge, b"%d\n" % version)


def killed(path: Path, rounds: int) -> None:
    """Kill one writer per round, soon after its n-th acknowledgement."""
    dice, last = random.Random(11), 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            asyncio.run(write_on(path, writing))
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            wanted, heard = 1 + dice.randrange(4), b""
            while heard.count(b"\n") < wanted:
                heard += pipe.read(100)
            time.sleep(dice.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            heard += pipe.readall()
        last = int(heard.split()[-1])
    print(last)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["many", address, name, times]:
            asyncio.run(many(address, name, int(times)))
        case ["killed", where, times]:
            killed(Path(where), int(times))
