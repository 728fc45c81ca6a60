"""What an extract of 100,000 tokens costs: CPU in ms of one never seen and of one whose messages were read before.

    python -m benchmarks.text

Carriers are written (``benchmarks/sets.py``): chat in English and in Chinese, and results of calls. Best of four, with
the garbage collector set as in the processes that plan.
"""

import json
from random import Random
from time import process_time

from benchmarks.sets import TOKENS_PER_CHARACTER, written
from policies.messages import ToolCall
from policies.text.extract import extract
from policies.text.segments import Readings, Source
from proxy.planning.workers import COLLECT_AFTER
from proxy.telemetry.process import collect_seldom

TOKENS = 100_000
KEPT = 4_000
ROUNDS = 4
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
    return [Source(n, m["role"], m["content"], tokens=counter.count(m["content"])) for n, m in enumerate(said)]


def results() -> list[Source]:
    """Calls with the records that answer them."""
    random, counter, sources = Random(7), Counter(0.4), list[Source]()
    tokens = 0
    while tokens < TOKENS:
        n = len(sources)
        asked = ToolCall(f"c{n}", "find_orders", json.dumps({"customer": f"mia_li_{n}"}))
        rows = [
            {"order_id": f"W-{random.randrange(10**6)}", "status": random.choice(("sent", "open")), "price": i * 7.5}
            for i in range(12)
        ]
        text = json.dumps({"customer": f"mia_li_{n}", "orders": rows})
        sources.append(Source(n, "assistant", "", calls=(asked,), tokens=20))
        sources.append(Source(n + 1, "tool", text, "find_orders", asked.arguments, counter.count(text)))
        tokens += 20 + counter.count(text)
    return sources


def main() -> None:
    """Print a line for each carrier."""
    collect_seldom(COLLECT_AFTER)
    carriers = {"chat": (chat("en"), 0.23), "results": (results(), 0.4), "chinese": (chat("zh"), 0.83)}
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


if __name__ == "__main__":
    main()
