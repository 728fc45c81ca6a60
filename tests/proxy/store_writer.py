"""A process that writes to a store until it is killed, for tests/proxy/test_store_faults.py.

``store_writer.py crash PATH ROUNDS`` forks a writer per round, kills it with SIGKILL at a random moment and prints
what had been acknowledged; ``states`` does it to one that saves checkpoints. ``full PATH``, ``hold PATH SECONDS`` and ``readonly PATH`` each show one fault.
"""

import asyncio
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import time
from pathlib import Path

import msgspec

from proxy.store import Store
from proxy.store.records import StoreError, StoreUnavailable
from tests.proxy.store_rows import change, exchange, original, saved, url

BIG = "x" * 20_000


async def write_on(path: Path, acknowledge: int) -> None:
    """Commit and record for ever, and say each version once it is acknowledged."""
    store = await Store.open(url(path))
    branch = await store.branch("tenant-a", "b1")
    version = branch.version if branch else 0
    while True:
        fresh = change(version, with_cut=True)
        body = original(0, of=f"big{version}", text=f"{version} {BIG}")
        version = await store.commit(msgspec.structs.replace(fresh, originals=(*fresh.originals, body)))
        os.write(acknowledge, b"%d\n" % version)
        await store.record([exchange(version, end=version.to_bytes(16, "big"), length=version)])


async def save_on(path: Path, acknowledge: int) -> None:
    """Save states of many pages for ever, every second one with a cut, and say each version once it is acknowledged."""
    store = await Store.open(url(path))
    branch = await store.branch("tenant-a", "b1")
    version = branch.version if branch else 0
    while True:
        given = change(version) if version % 2 else saved(version)
        version = await store.commit(msgspec.structs.replace(given, checkpoint=big_state(version)))
        os.write(acknowledge, b"%d\n" % version)
        if version % 10 == 0:
            await store.checkpoint()  # else each round begins with all that the ones before it wrote


def big_state(expected: int) -> str:
    """A state of some 60 KB that is told from every other by its first and its last character."""
    return f"{expected} {chr(97 + expected % 26) * 60_000} {expected}"


WRITERS = {"crash": write_on, "states": save_on}


def crash(path: Path, rounds: int, kind: str) -> None:
    """Kill one writer per round, soon after its n-th acknowledgement; print the last acknowledged version of each."""
    dice, said = random.Random(7), []
    asyncio.run(prepare(path))
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            asyncio.run(WRITERS[kind](path, writing))
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            wanted, heard = dice.randrange(5), b""
            while heard.count(b"\n") < wanted:
                heard += pipe.read(100)
            time.sleep(dice.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            heard += pipe.readall()
        said.append(int(heard.split()[-1]) if heard else 0)
    print(json.dumps(said))


async def prepare(path: Path) -> None:
    """Make the schema, so that no round spends its time on it."""
    store = await Store.open(url(path))
    await store.close()


async def fill_up(path: Path) -> None:
    """Commit until the file size limit is met, go on reading, and go on writing when there is room again."""
    store = await Store.open(url(path))
    await store.commit(change(0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    version, refused = 1, ""
    while not refused:
        try:
            version = await store.commit(
                msgspec.structs.replace(change(version), originals=(original(0, of=f"big{version}", text=BIG * 5),))
            )
        except StoreUnavailable as error:
            refused = error.reason
    found = await store.branch("tenant-a", "b1")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    again = await store.commit(change(version))
    await store.close()
    print(json.dumps({"refused": refused, "version": version, "read": found.version if found else 0, "again": again}))


def hold(path: Path, seconds: float) -> None:
    """Hold the write lock."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("held", flush=True)
    time.sleep(seconds)
    connection.execute("ROLLBACK")
    connection.close()


async def read_only(path: Path) -> None:
    """Try to open, as somebody who may not write."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        store = await Store.open(url(path))
    except StoreError as error:
        print(json.dumps({"reason": error.reason, "text": str(error)}))
    else:
        await store.close()
        print(json.dumps({"reason": None}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [("crash" | "states") as kind, where, times]:
            crash(Path(where), int(times), kind)
        case ["full", where]:
            asyncio.run(fill_up(Path(where)))
        case ["hold", where, seconds]:
            hold(Path(where), float(seconds))
        case ["readonly", where]:
            asyncio.run(read_only(Path(where)))
