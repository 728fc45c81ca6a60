"""Every preset on every set, in a window of a quarter of each conversation.

    python -m benchmarks.presets [--data DIR] [--preset NAME ...] [--most N] [--json]

Requests are planned in this process without a model, so layers that need one are passed over. Shown
are requests that fit (refused ones do not), batches of edits, prefix reuse, facts in the window
when they were needed and those that the archive could give back, and the cost of all prompts
against the same requests unmanaged in a window that is large enough. A preset that is worse than a
sliding window is no error: some of them reproduce older systems.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.cost import MAX_TOKENS, PRICES, agent_loop, generated, played, recorded
from benchmarks.retention import default_data
from policies.settings import ContextSettings
from proxy.config.presets import policy_from, preset_documents
from proxy.features.replay.play import Tally
from proxy.features.replay.scenarios import Conditions
from proxy.features.replay.script import Script
from proxy.wire.counting import TextCounter, Tokenizer

SETS = {
    "tau_airline, 6 chained": recorded("tau_airline", at_once=6),
    "tau_airline_long": recorded("tau_airline_long"),
    "swe_agent, 4 chained": recorded("swe_agent", at_once=4),
    "agent loop": generated(lambda: agent_loop(60, words=280, name="agent")),
}
MIN_WINDOW = 2_048
SHARE = 4
HEADER = (
    f"{'preset':22} {'requests':>8} {'fit':>6} {'batches':>7} {'reuse':>6} {'facts':>6}"
    f" {'archive':>7} {'cost':>5} {'sliding':>7}"
)


def presets(names: Sequence[str]) -> list[ContextSettings]:
    """The presets of these names, all but ``off`` for none."""
    documents = preset_documents()
    wanted = names or [name for name in documents if name != "off"]
    return [policy_from(name, documents[name], presets=documents) for name in wanted]


def play(
    name: str, data: Path, policies: Sequence[ContextSettings], counter: TextCounter, *, most: int
) -> Mapping[str, Tally]:
    """One set under every policy, sums by scenario."""
    totals: dict[str, Tally] = {}
    for number, recording in enumerate(SETS[name](data)):
        if number == most:
            break
        script = Script(recording, counter=counter, model="")
        whole = script.transcript(len(script.messages)).tokens
        window = max(MIN_WINDOW, whole // SHARE)
        conditions = Conditions(
            counter=counter, window=window, max_tokens=min(MAX_TOKENS, window // 8)
        )
        for scenario, tally in asyncio.run(played(script, policies, conditions, PRICES)).items():
            totals.setdefault(scenario, Tally()).add(tally)
    return totals


def lines(name: str, totals: Mapping[str, Tally]) -> Iterator[str]:
    """One set for people."""
    first = next(iter(totals.values()))
    yield (
        f"\n{name}: {first.conversations} conversations, the largest of {first.largest:,}"
        f" tokens\n{HEADER}"
    )
    for case, tally in totals.items():
        kept = tally.retention
        yield (
            f"{case:22} {tally.requests:>8} {tally.fit / tally.requests:>6.1%} {tally.batches:>7}"
            f" {tally.reuse:>6.1%} {_share(kept.kept, kept.needed):>6}"
            f" {_share(kept.recoverable, kept.needed):>7} {tally.ratio:>5.2f}"
            f" {tally.against_sliding:>7.2f}"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument(
        "--preset", action="append", default=[], help="only this one; may be repeated"
    )
    parser.add_argument("--most", type=int, default=2, help="conversations of a set")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    options = parser.parse_args(arguments)
    policies = presets(options.preset)
    counter = Tokenizer().counter("o200k_base")
    found: dict[str, object] = {}
    for name in SETS:
        totals = play(name, options.data, policies, counter, most=options.most)
        if not totals:
            continue
        found[name] = {scenario: tally.values() for scenario, tally in totals.items()}
        if not options.json:
            print("\n".join(lines(name, totals)), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
