"""What an extract of 100,000 tokens costs, and the whole batch: CPU in ms.

    python -m benchmarks.text

The extract of what was never seen and of what was read before, of written carriers
(``benchmarks/sets.py``): chat in English and in Chinese, and results of calls; best of four, with
the garbage collector set as in the processes that plan. Then cold histories, a chat's and an
agent's, sent to a served Weir in a window of 32,768, and each again when it has grown by a fifth,
which makes a batch more: CPU of all of its processes until they are quiet, that is reading,
counting, planning, archiving and indexing. The median of six.
"""

import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

from benchmarks.neighbours import WINDOW, tree
from benchmarks.processes import Cores, Running, companion, weir
from benchmarks.sets import TOKENS_PER_CHARACTER, written
from benchmarks.traffic import Conversation
from policies.messages import ToolCall
from policies.text.extract import extract
from policies.text.segments import Readings, Source
from proxy.planning.workers import COLLECT_AFTER
from proxy.telemetry.process import collect_seldom

TOKENS = 100_000
KEPT = 4_000
ROUNDS = 4
SERVED = 6
STARTED = 2
"""Requests that are measured, after those with which the worker starts."""
GROWN = 1.2
AGENTS_STEPS = 21
MAX_MS = 120


class Counter:
    """Tokens at the rate of a language."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return int(len(text) * self._rate) + 1


def chat(language: str) -> list[Source]:
    """A conversation in a language."""
    counter = Counter(TOKENS_PER_CHARACTER[language])
    said = [message for turn in written(language, TOKENS, Random(7)) for message in turn]
    return [
        Source(n, m["role"], m["content"], tokens=counter.count(m["content"]))
        for n, m in enumerate(said)
    ]


def results() -> list[Source]:
    """Calls with the records that answer them."""
    random = Random(7)
    counter = Counter(0.4)
    sources = list[Source]()
    tokens = 0
    while tokens < TOKENS:
        n = len(sources)
        asked = ToolCall(f"c{n}", "find_orders", json.dumps({"customer": f"mia_li_{n}"}))
        rows = [
            {
                "order_id": f"W-{random.randrange(10**6)}",
                "status": random.choice(("sent", "open")),
                "price": i * 7.5,
            }
            for i in range(12)
        ]
        text = json.dumps({"customer": f"mia_li_{n}", "orders": rows})
        sources.append(Source(n, "assistant", "", calls=(asked,), tokens=20))
        sources.append(
            Source(n + 1, "tool", text, "find_orders", asked.arguments, counter.count(text))
        )
        tokens += 20 + counter.count(text)
    return sources


def bodies(kind: str) -> Iterator[tuple[bytes, bytes]]:
    """Requests of histories that nobody has seen, and the same when they have grown by a fifth."""
    for n in range(STARTED + SERVED):
        if kind == "agent":
            agent = Conversation(Random(n))
            grown = [agent.next().data.partition(b"\r\n\r\n")[2] for _ in range(AGENTS_STEPS)]
            yield grown[0], grown[-1]
        else:
            talk = [m for turn in written("en", int(GROWN * TOKENS), Random(n)) for m in turn]
            yield told(talk[: int(len(talk) / GROWN)]), told(talk)


def told(talk: Sequence[object]) -> bytes:
    """A request that ends a talk."""
    asked = {"role": "user", "content": "And now?"}
    return json.dumps({"model": "gpt-4o-mini", "messages": [*talk, asked]}).encode()


def spent(served: Running) -> dict[int, float]:
    """CPU seconds of each of Weir's processes."""
    used: dict[int, float] = {}
    for pid in tree(served.pid):
        try:
            used[pid] = time.clock_gettime((~pid << 3) | 2)
        except OSError:
            continue
    return used


def batch(served: Running, body: bytes) -> tuple[float, float]:
    """CPU ms of all processes, and of the one that serves, for a request of which something is
    removed.
    """
    headers = {"Authorization": "Bearer sk-text", "Content-Type": "application/json"}
    before = spent(served)
    address = f"http://127.0.0.1:{served.port}/v1/chat/completions"
    with urllib.request.urlopen(
        urllib.request.Request(address, body, headers), timeout=60
    ) as answer:
        answer.read()
        assert answer.headers["x-weir-actions"] not in {None, "none"}, answer.headers
    time.sleep(1.0)
    used = {pid: 1_000 * (now - before.get(pid, 0.0)) for pid, now in spent(served).items()}
    return sum(used.values()), used[served.pid]


def print_served() -> None:
    """Print two lines for each kind of history."""
    print(f"\n{'batch served':18}{'CPU ms':>8}{'of it serving':>15}")
    for kind in ("chat", "agent"):
        with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
            place = Path(home)
            cores = Cores.split()
            every = cores.tested | cores.others
            with (
                companion("stub", "--any", name="stub", cores=every, home=place) as stub,
                weir("weir", upstream=stub.port, window=WINDOW, cores=every, home=place) as served,
            ):
                taken = [[batch(served, body) for body in both] for both in bodies(kind)][STARTED:]
        for name, batches in zip((kind, f"{kind}, grown"), zip(*taken, strict=True), strict=True):
            print(
                f"{name:18}{median(t for t, _ in batches):8.0f}"
                f"{median(s for _, s in batches):15.0f}"
            )


def main() -> None:
    """Print a line for each carrier."""
    collect_seldom(COLLECT_AFTER)
    carriers = {
        "chat": (chat("en"), 0.23),
        "results": (results(), 0.4),
        "chinese": (chat("zh"), 0.83),
    }
    print(f"{'carrier':10}{'tokens':>8}{'never seen':>12}{'seen':>8}   at most {MAX_MS} never seen")
    for name, (sources, rate) in carriers.items():
        fresh: list[float] = []
        seen: list[float] = []
        for _ in range(ROUNDS):
            readings = Readings()
            for times in (fresh, seen):
                begun = process_time()
                extract(sources, max_tokens=KEPT, counter=Counter(rate), readings=readings)
                times.append(1_000 * (process_time() - begun))
        print(f"{name:10}{sum(s.tokens for s in sources):8}{min(fresh):12.0f}{min(seen):8.0f}")
    print_served()


if __name__ == "__main__":
    main()
