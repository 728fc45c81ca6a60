"""What a real model answers about conversations that do not fit its window: with Weir, and with the
newest messages.

    python -m benchmarks.answers --port 8110 [--window 8192] [--json FILE]

Needs an OpenAI-compatible model server on that port of this machine, whose context is the window;
for example

    llama-server -m model.gguf -c 8192 -np 1 --jinja --host 127.0.0.1 --port 8110

Each conversation of tests/data/sample is sent whole with each of its questions: through a Weir in
front of the model (``weir``), cut to its system prompt and newest messages of as many tokens as
Weir sent (``tail``), and as it is (``unmanaged``). An answer is right where it holds what the
question's ``answer`` names; temperature 0, one run.
"""

import argparse
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT, Cores, weir
from benchmarks.served import Chat, size

SAMPLE = ROOT / "tests" / "data" / "sample"
BRIEFLY = " Answer in one short sentence."
MAX_ANSWER = 48
PATIENCE = 600.0
WAYS = ("weir", "tail", "unmanaged")


def ask(port: int, messages: Chat) -> tuple[int, str, int, str]:
    """Status, text of the answer or the error, tokens as the model server counts, and
    ``x-weir-tokens``.
    """
    body = {
        "model": "local",
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_ANSWER,
        "cache_prompt": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            answer = json.load(response)
            text = answer["choices"][0]["message"]["content"] or ""
            return (
                200,
                text,
                answer["usage"]["prompt_tokens"],
                response.headers.get("x-weir-tokens", ""),
            )
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace"), 0, ""


def newest(messages: Chat, budget: int) -> Chat:
    """The system prompt and the newest messages that fit; a tool's result never without its
    call.
    """
    head = [message for message in messages[:1] if message["role"] == "system"]
    start = len(messages) - 1
    while start > len(head) and size([*head, *messages[start - 1 :]]) <= budget:
        start -= 1
    while messages[start]["role"] == "tool":
        start += 1
    return [*head, *messages[start:]]


def is_right(answer: str, wanted: list[list[str]]) -> bool:
    """Whether of each group one wording is in the answer."""
    text = answer.casefold()
    return all(any(wording.casefold() in text for wording in group) for group in wanted)


def measure(
    conversation: Mapping[str, Any], port: int, through: int, console: Console
) -> list[dict[str, Any]]:
    """A row for each question and way."""
    rows: list[dict[str, Any]] = []
    name = conversation["meta"]["id"]
    budget = 0
    for way in WAYS:
        history = conversation["messages"]
        if way == "tail":
            # once, so that the model server's cache serves all questions
            history = newest(history, budget)
        for probe in conversation["probes"]:
            sent = [*history, {"role": "user", "content": probe["question"] + BRIEFLY}]
            status, text, tokens, header = ask(through if way == "weir" else port, sent)
            if way == "weir":
                budget = max(budget, after(header))
            right = status == 200 and is_right(text, probe.get("answer", probe["needles"]))
            rows.append(
                {
                    "conversation": name,
                    "way": way,
                    "question": probe["question"],
                    "status": status,
                    "answer": text[:300],
                    "right": right,
                    "tokens": tokens,
                }
            )
            if status != 200:
                break  # it is refused for its size, and so are the others
        of_way = [row for row in rows if row["way"] == way]
        console.log(
            f"{name}, {way}: {sum(row['right'] for row in of_way)} of {len(conversation['probes'])}"
            " right"
        )
    return rows


def after(header: str) -> int:
    """Tokens that Weir sent, of ``x-weir-tokens``."""
    fields = dict(part.split("=", 1) for part in header.split(";") if "=" in part)
    return int(fields.get("after", 0))


def main() -> int:
    """Measure and print; 1 where the model server does not answer."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port", type=int, required=True, help="of the model server on this machine"
    )
    parser.add_argument(
        "--window", type=int, default=8_192, help="the model server's context, tokens (8192)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every question and answer here"
    )
    options = parser.parse_args()
    console = Console(width=120)
    conversations = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(SAMPLE.glob("*.json"))
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weir-answers-") as home:
        cores = Cores.split()
        every = cores.tested | cores.others
        with weir(
            "weir", upstream=options.port, window=options.window, cores=every, home=Path(home)
        ) as proxy:
            for conversation in conversations:
                rows += measure(conversation, options.port, proxy.port, console)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    table = Table("conversation", "questions", *WAYS)
    for conversation in conversations:
        name = conversation["meta"]["id"]
        table.add_row(
            name, str(len(conversation["probes"])), *(_cell(rows, name, way) for way in WAYS)
        )
    console.print(table)
    return 0


def _cell(rows: list[dict[str, Any]], name: str, way: str) -> str:
    of_way = [row for row in rows if row["conversation"] == name and row["way"] == way]
    if any(row["status"] != 200 for row in of_way):
        return f"refused ({of_way[-1]['status']})"
    tokens = sum(row["tokens"] for row in of_way) // max(1, len(of_way))
    return f"{sum(row['right'] for row in of_way)} right, {tokens} tokens"


if __name__ == "__main__":
    sys.exit(main())
