"""Retention without a model: which facts of recorded conversations are still in the window when they are needed.

    python -m benchmarks.retention [--data DIR] [--json] [--set NAME --budget N] [--misses]

A request is forwarded as head, first user message, summary, kept tail. Tokens are o200k_base plus 4 a message.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from policies.extraction.extract import Readings, Source, extract
from policies.messages import ToolCall
from policies.settings import BALANCED_SHAPES
from policies.summary import render_summary
from proxy.tokenizer import Vocabulary, vocabulary_directories

Chat = list[dict[str, Any]]
PER_MESSAGE = 4
PLANS: tuple[tuple[str, int], ...] = (
    ("tau_airline", 3_000),
    ("tau_airline", 2_000),
    ("tau_airline", 1_800),
    ("longmemeval_windows", 4_000),
    ("longmemeval_windows", 2_500),
    ("side_constraints", 1_500),
    ("side_constraints:middle", 1_500),
    ("side_constraints:end", 1_500),
    ("side_constraints:paraphrased", 1_500),
    ("canary_sessions", 300),
    ("swe_agent", 4_000),
    ("tau_airline_long", 4_000),
    ("wording", 30),
    ("wording_unseen", 30),
)
SHARES = frozenset({"wording", "wording_unseen"})
"""Sets of conversations of many lengths: the budget is the first two messages and a percentage of the rest."""
PARAPHRASES = (
    "Please stop checking in with me for permission, go ahead and run commands or edit things yourself.",
    "I want to see any command, message or edit first and approve it, so hold on until I say yes.",
    "You may prepare emails for me but sending them is something I will handle.",
    "My name has to stay out of everything you write and out of all tool calls.",
    "Keep my phone number out of files, notes and forms.",
    "The confidential folder is off limits, leave the files in there alone.",
    "I'd rather you searched the web first for every answer, including the ones you feel sure about.",
    "Once a task is done, close with a single line saying what you did.",
    "Start each answer by repeating what I asked in a sentence of your own.",
    "For paper suggestions I favour arXiv preprints above journals and conferences.",
    "Metric units for me please, imperial ones are no use.",
    "Quote original sources whenever you cite, secondary ones don't count.",
    "Spell out all numbers in words in your answers; digits are not OK.",
    'The last sentence of all your answers has to be: "Let me know if you need anything else."',
    "Bullet points for everything you answer, please no running prose.",
)


class O200k:
    """Exact tokens of o200k_base."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary("o200k_base", vocabulary_directories())

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return self._vocabulary.count(text)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    budget: int
    needed: int
    in_window: float
    keep_last: float
    over: int
    stale: int


def content_of(message: dict[str, Any]) -> str:
    """The text of a message, parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(p.get("text", "")) for p in content)
    return content or ""


def calls_of(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The tool calls that a message makes."""
    return tuple(
        ToolCall(c.get("id", ""), c["function"]["name"], c["function"]["arguments"])
        for c in message.get("tool_calls") or ()
    )


def written(message: dict[str, Any]) -> str:
    """Everything of a message that a model reads."""
    return content_of(message) + "".join(f" {c.name} {c.arguments}" for c in calls_of(message))


def size(message: dict[str, Any], counter: O200k) -> int:
    """Tokens of a message."""
    return counter.count(written(message)) + PER_MESSAGE


def cut_middle(text: str, *, max_tokens: int, counter: O200k) -> str:
    """Head and tail of ``text`` within ``max_tokens``."""
    if counter.count(text) <= max_tokens:
        return text
    keep = len(text)
    while keep > 0:
        short = f"{text[: keep * 2 // 3]}\n[…]\n{text[len(text) - keep // 3 :]}"
        tokens = counter.count(short)
        if tokens <= max_tokens:
            return short
        keep = min(keep - 1, keep * max_tokens // (tokens + 1))
    return ""


def steps(messages: Chat, start: int) -> list[tuple[int, int]]:
    """Spans of whole steps from ``start``: an assistant message with its results, or one other message."""
    found: list[tuple[int, int]] = []
    index = start
    while index < len(messages):
        stop = index + 1
        if messages[index].get("tool_calls"):
            while stop < len(messages) and messages[stop]["role"] == "tool":
                stop += 1
        found.append((index, stop))
        index = stop
    return found


def to_source(messages: Chat, index: int) -> Source:
    """Message ``index`` as a source of the extract."""
    message = messages[index]
    if message["role"] == "tool":
        for earlier in range(index - 1, -1, -1):
            for call in calls_of(messages[earlier]):
                if call.id == message.get("tool_call_id"):
                    return Source(index, "tool", content_of(message), call.name, call.arguments)
    return Source(index, message["role"], content_of(message), calls=calls_of(message))


def kept_tail(messages: Chat, start: int, *, room: int, share: float, counter: O200k) -> tuple[int, dict[int, str]]:
    """Where the kept tail starts, and the messages in it that had to be cut."""
    spans = steps(messages, start)
    cut: dict[int, str] = {}
    first, used = len(messages), 0
    for nth, (begin, stop) in enumerate(reversed(spans)):
        tokens = sum(size(messages[i], counter) for i in range(begin, stop))
        if nth == 0:
            for i in range(begin, stop):
                limit = max(16, room // 4 if messages[i]["role"] == "assistant" else room // 3)
                if size(messages[i], counter) > limit and messages[i]["role"] in {"tool", "assistant"}:
                    cut[i] = cut_middle(content_of(messages[i]), max_tokens=limit - PER_MESSAGE, counter=counter)
            tokens = sum(
                counter.count(cut[i]) + PER_MESSAGE if i in cut else size(messages[i], counter)
                for i in range(begin, stop)
            )
        elif used + tokens > share * room:
            break
        first, used = begin, used + tokens
    return first, cut


def forward(messages: Chat, budget: int, *, counter: O200k, fill: bool = True) -> list[str]:
    """The texts of the request that goes upstream: unchanged if it fits, else head, task, summary and tail."""
    if sum(size(m, counter) for m in messages) <= budget:
        return [written(m) for m in messages]
    head = next((i for i, m in enumerate(messages) if m["role"] not in {"system", "developer"}), len(messages))
    task = next((i for i in range(head, len(messages)) if messages[i]["role"] == "user"), head)
    fixed = sum(size(m, counter) for m in messages[: task + 1])
    room = budget - fixed
    shape = next(s for s in BALANCED_SHAPES if s.window is None or budget <= s.window)
    first, cut = kept_tail(messages, task + 1, room=room, share=shape.tail, counter=counter)
    tail = [cut.get(i, written(messages[i])) for i in range(first, len(messages))]
    left = room - sum(counter.count(t) + PER_MESSAGE for t in tail)
    sources = [to_source(messages, i) for i in (*range(task + 1, first), *sorted(cut))]
    frame = counter.count(render_summary("", version=1, ref="0" * 12, removed=999)) + PER_MESSAGE
    share = left if fill else min(left, int(shape.low_water * room))
    front = [written(m) for m in messages[: task + 1]]
    later = [content_of(m) for m in messages[first:] if m["role"] == "user"]
    readings = Readings()
    allowed = share - frame
    while allowed > 0:
        goal = content_of(messages[task])
        made = extract(
            sources,
            max_tokens=allowed,
            counter=counter,
            goal=goal,
            visible=(*front, *tail),
            later=later,
            readings=readings,
        )
        summary = render_summary(made.text, version=1, ref="3fa9c1d27b60", removed=len(sources))
        excess = counter.count(summary) + PER_MESSAGE - share
        if made.text and excess <= 0:
            return [*front, summary, *tail]
        allowed -= max(1, excess)
    return [*front, *tail]


def keep_last(messages: Chat, budget: int, *, counter: O200k, fill: bool = True) -> list[str]:
    """The sliding window: head, then as many of the newest messages as fit."""
    head = next((i for i, m in enumerate(messages) if m["role"] not in {"system", "developer"}), len(messages))
    used = sum(size(m, counter) for m in messages[:head])
    first = len(messages)
    while first > head and used + size(messages[first - 1], counter) <= budget:
        first -= 1
        used += size(messages[first], counter)
    return [written(m) for m in (*messages[:head], *messages[first:])]


def load(name: str, data: Path) -> Iterator[tuple[Chat, list[dict[str, Any]]]]:
    """The conversations of a set with their facts; ``name:place`` moves or rewords the side constraint."""
    file, _, variant = name.partition(":")
    with (data / f"{file}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    for number, row in enumerate(rows):
        yield displace(row, variant, number) if variant else (row["messages"], row["meta"]["facts"])


def displace(row: dict[str, Any], variant: str, number: int) -> tuple[Chat, list[dict[str, Any]]]:
    """The conversation with its side constraint moved to the ``middle`` or ``end``, or ``paraphrased`` somewhere."""
    messages = [dict(m) for m in row["messages"]]
    fact = dict(row["meta"]["facts"][0])
    at = fact["evidence_msg"]
    old = fact["needles"][0]
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    messages[at]["content"] = messages[at]["content"].replace(old, "").strip()
    new = PARAPHRASES[number % len(PARAPHRASES)] if variant == "paraphrased" else old
    place = {"middle": len(users) // 2, "end": len(users) - 4, "paraphrased": (number * 7) % (len(users) - 4)}[variant]
    target = messages[users[place]]
    target["content"] = f"{target['content']} {new}" if number % 2 else f"{new} {target['content']}"
    return messages, [{**fact, "needles": [new]}]


Forward = Callable[..., list[str]]


def judge(
    name: str, budget: int, data: Path, *, by: Forward, counter: O200k, fill: bool, misses: list[str]
) -> tuple[int, int, int, int]:
    """Facts needed, facts present, requests over budget, stale answers."""
    needed = present = over = stale = 0
    for number, (messages, facts) in enumerate(load(name, data)):
        forwarded: dict[int, str] = {}
        room = share_of(messages, budget, counter=counter) if name in SHARES else budget
        for fact in facts:
            for at in fact.get("needed_at") or [len(messages)]:
                if at not in forwarded:
                    texts = by(messages[:at], room, counter=counter, fill=fill)
                    tokens = sum(counter.count(t) + PER_MESSAGE for t in texts)
                    fits = sum(size(m, counter) for m in messages[:1]) < room
                    over += tokens > room and fits
                    forwarded[at] = "\n".join(texts).lower()
                needed += 1
                wanted = fact.get("needles") or [str(fact["value"])]
                found = all(w.lower() in forwarded[at] for w in wanted)
                present += found
                old = any(s.lower() in forwarded[at] for s in fact.get("superseded", ()))
                stale += old and (not found or name in SHARES)
                if not found:
                    misses.append(
                        f"{name} {budget} #{number} at {at}: {[w for w in wanted if w.lower() not in forwarded[at]]}"
                    )
    return needed, present, over, stale


def share_of(messages: Chat, percent: int, *, counter: O200k) -> int:
    """The first two messages and so many percent of the others, tokens."""
    sizes = [size(m, counter) for m in messages]
    return sum(sizes[:2]) + sum(sizes[2:]) * percent // 100


def measure(name: str, budget: int, data: Path, *, counter: O200k, fill: bool, misses: list[str]) -> Row:
    """One row: this product's layout beside the sliding window."""
    needed, present, over, stale = judge(name, budget, data, by=forward, counter=counter, fill=fill, misses=misses)
    _, last, _, _ = judge(name, budget, data, by=keep_last, counter=counter, fill=fill, misses=[])
    return Row(name, budget, needed, present / max(1, needed), last / max(1, needed), over, stale)


def default_data() -> Path:
    """The shared data beside the checkout if present, else the small file beside the tests."""
    root = Path(__file__).resolve().parent.parent
    shared = root.parent / "shared" / "data"
    return shared if shared.is_dir() else root / "tests" / "policies" / "data"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--set", dest="name", help="only this set")
    parser.add_argument("--budget", type=int, help="only this budget")
    parser.add_argument(
        "--low-water",
        action="store_true",
        help="stop at the low-water mark of the window's shape instead of the budget",
    )
    parser.add_argument("--misses", action="store_true", help="list every fact that was missing")
    options = parser.parse_args(arguments)
    counter, misses = O200k(), list[str]()
    plans = [(n, options.budget or b) for n, b in PLANS if (options.name or n) == n]
    plans = [(n, b) for n, b in dict.fromkeys(plans) if (options.data / f"{n.partition(':')[0]}.jsonl").exists()]
    rows = [measure(n, b, options.data, counter=counter, fill=not options.low_water, misses=misses) for n, b in plans]
    if options.json:
        print(json.dumps([asdict(replace(row)) for row in rows], indent=1))
    else:
        print(f"{'set':30} {'budget':>6} {'needed':>6} {'in window':>9} {'keep-last':>9} {'over':>4} {'stale':>5}")
        for r in rows:
            print(f"{r.name:30} {r.budget:6} {r.needed:6} {r.in_window:9.1%} {r.keep_last:9.1%} {r.over:4} {r.stale:5}")
    if options.misses:
        print("\n".join(misses), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
