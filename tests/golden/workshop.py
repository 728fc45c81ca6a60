"""A written session that has what recordings lack: images, thinking, fenced notes, polls, reports, marks, memory."""

import base64
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
FOLDERS = ("billing", "ledger", "import", "mailer", "search", "export")
VERBS = ("checks", "rounds", "stores", "rejects", "retries", "merges")
NOUNS = ("invoice", "customer", "currency", "queue", "header", "deadline", "receipt", "tenant")
QUESTIONS = (
    "Which port does the staging queue listen on, and who may restart it?",
    "What did the very first run of the importer fail with?",
    "Remind me of the ticket for the rounding of Swiss receipts.",
    "Which file holds the retry limits, and what are they?",
)
TOOLS = ("read_file", "run", "poll", "search", "fetch", "research", "TodoWrite", "deploy", "translate", "draw")


def session(*, steps: int = 36, seed: int = 5, idea: str = "workshop") -> Row:
    """One conversation in the form of the recordings."""
    rng = random.Random(seed)
    messages: list[Row] = [
        {"role": "system", "content": "You are a careful engineer. Answer briefly. Never push to main."},
        {"role": "user", "content": f"Migrate the {idea} service to the new ledger, see docs/plan-17.md. Keep API v2."},
        {"role": "user", "name": "memory", "content": "<memory>Staging queue: port 48213, only Mara may restart it."},
    ]
    for number in range(steps):
        messages += _step(rng, number)
    messages.append({"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]})
    return {"messages": messages, "tools": [*map(_tool, TOOLS)], "meta": {"id": f"{idea}-{seed}"}}


def _tool(name: str) -> Row:
    about = f"{name}: " + " ".join(f"It {verb} the {noun}." for verb, noun in zip(VERBS, NOUNS, strict=False))
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": about}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _step(rng: random.Random, number: int) -> Iterator[Row]:
    kind = number % 16
    if kind in (5, 12):
        yield _user(rng, number)
    if kind == 7:
        yield from _called(number, "poll", {"job": "import"}, f"status: running\n{_log(rng, 30, seed=3)}\nrow {number}")
    elif kind == 9:
        yield from _called(number, "read_file", {"path": "src/retry.py"}, _code(random.Random(9), 40))
    elif kind == 10:
        yield from _called(number, "research", {"task": f"compare ledgers {number}"}, _prose(rng, 420))
    elif kind == 11:
        todos = [
            {"content": f"port {f}", "status": "completed" if n < number // 9 else "pending"}
            for n, f in enumerate(FOLDERS)
        ]
        yield from _called(number, "TodoWrite", {"todos": todos}, "ok")
    elif kind == 13:
        yield from _called(number, "fetch", {"url": f"https://intra/api/{number}"}, _document(rng, number))
    elif kind == 15:
        yield from _pair(rng, number)
    else:
        folder = FOLDERS[number % len(FOLDERS)]
        text = _code(rng, rng.choice((6, 18, 45, 120))) if kind % 2 else _log(rng, rng.choice((8, 25, 70)), seed=number)
        tool = "read_file" if kind % 2 else "run"
        yield from _called(number, tool, {"path": f"src/{folder}/part_{number}.py"}, text, keep=_mark(number))
    if kind in (4, 11):
        note = f"\n```decision high\nUse Decimal in src/{FOLDERS[number % 6]}/money.py, ticket PAY-{number}7.\n```"
        yield {"role": "assistant", "content": _prose(rng, 60) + note, "reasoning_content": _prose(rng, 90)}
        yield _user(rng, number + 1)


def _mark(number: int) -> bool | None:
    return {3: False, 18: True, 33: False}.get(number)


def _user(rng: random.Random, number: int) -> Row:
    said = f"Also: receipts of {rng.choice(('CHF', 'SEK'))} round up, PAY-{number}. {_prose(rng, rng.choice((8, 30, 260)))}"
    if number % 3:
        return {"role": "user", "content": f"{said} {QUESTIONS[number % len(QUESTIONS)]}" if number % 2 else said}
    url = "data:image/png;base64," + base64.b64encode(_picture(number)).decode()
    return {
        "role": "user",
        "content": [{"type": "text", "text": said}, {"type": "image_url", "image_url": {"url": url}}],
    }


def _picture(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 300 + number) + b"\x08\2\0\0\0"


def _called(number: int, tool: str, arguments: Row, text: str, *, keep: bool | None = None) -> Iterator[Row]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    said: Row = {
        "role": "assistant",
        "content": f"Looking at step {number}." if number % 3 else None,
        "tool_calls": [call],
    }
    if number % 4 == 1:
        said["reasoning_content"] = f"Think about {tool} {number}. " * (5 + number % 7)
    yield said
    yield {"role": "tool", "tool_call_id": f"call_{number}", "content": text} | (
        {} if keep is None else {"weir": {"keep": keep}}
    )


def _pair(rng: random.Random, number: int) -> Iterator[Row]:
    calls = [
        {
            "id": f"call_{number}.{n}",
            "type": "function",
            "function": {"name": "search", "arguments": f'{{"q": "{NOUNS[n]}"}}'},
        }
        for n in range(2)
    ]
    yield {"role": "assistant", "content": "Two searches.", "tool_calls": calls}
    for call in reversed(calls):
        yield {"role": "tool", "tool_call_id": call["id"], "content": _log(rng, 14, seed=number)}


def _prose(rng: random.Random, words: int) -> str:
    said = [
        f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.randrange(900)}."
        for _ in range(max(1, words // 6))
    ]
    return " ".join(said)


def _code(rng: random.Random, lines: int) -> str:
    return "\n".join(
        f"def {rng.choice(VERBS)}_{rng.choice(NOUNS)}(value={n}): return value * {rng.randrange(99)}  # L{n}"
        for n in range(lines)
    )


def _log(rng: random.Random, lines: int, *, seed: int) -> str:
    at = random.Random(seed)
    rows = [
        f"2026-03-0{at.randrange(1, 9)} INFO {at.choice(NOUNS)} {at.choice(VERBS)} {at.randrange(9999)}"
        for _ in range(lines)
    ]
    if seed % 5 == 2:
        rows[lines // 2] = f"ERROR src/{FOLDERS[seed % 6]}/part.py:{seed} KeyError: 'tenant_{rng.randrange(99)}'"
    return "\n".join(rows)


def _document(rng: random.Random, number: int) -> str:
    entries = [{"id": f"rec_{number}_{n}", "debug": _prose(rng, 20), "total": rng.randrange(9999)} for n in range(25)]
    return json.dumps({"page": number, "entries": entries, "trace": _prose(rng, 40)}, indent=1)
