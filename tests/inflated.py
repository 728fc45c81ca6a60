"""Captured conversations made long: their steps over and over, with fresh ids and longer results."""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.captures import Capture, everything, sample
from tests.forwarding import history, unmarked
from tests.functional.harness import prose

FRESH = frozenset({"id", "call_id", "tool_use_id", "signature", "data", "encrypted_content"})


@dataclass(frozen=True)
class Steps:
    """A captured run taken apart: everything but the array, its beginning, and what each request added."""

    name: str
    path: str
    fields: Mapping[str, Any]
    first: Sequence[Any]
    added: Sequence[Sequence[Any]]
    marks: bool

    def requests(self, count: int, *, words: int, seed: int = 1) -> Iterator[bytes]:
        """``count`` requests, each with all of the one before; every result has so many more words."""
        rng = random.Random(seed)
        array = [*copy.deepcopy(list(self.first))]
        for number in range(count):
            if number:
                step = copy.deepcopy(list(self.added[(number - 1) % len(self.added)]))
                array += [renewed(each, number, rng, words) for each in step]
            sent = with_marker(array) if self.marks else array
            name = "input" if self.path == "/v1/responses" else "messages"
            yield json.dumps({**self.fields, name: sent}, ensure_ascii=False).encode()


def renewed(value: Any, number: int, rng: random.Random, words: int) -> Any:
    """The same with ids of its own, and longer where it is a result."""
    if isinstance(value, list):
        return [renewed(each, number, rng, words) for each in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for key, each in value.items():
        if key in FRESH and isinstance(each, str):
            made[key] = f"{each[:48]}{number:04d}"
        elif key in ("output", "content") and isinstance(each, str) and is_result(value):
            made[key] = f"{each} {prose(rng.randint(words // 2, words), seed=rng.randint(1, 9_999_999))}"
        else:
            made[key] = renewed(each, number, rng, words)
    return made


def is_result(value: Mapping[str, Any]) -> bool:
    return str(value.get("type")) == "tool_result" or str(value.get("type")).endswith("_output")


def with_marker(array: Sequence[Any]) -> list[Any]:
    """The array with a cache marker on its last block, as Claude Code moves it on."""
    last = copy.deepcopy(array[-1])
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return [*array[:-1], last]


def runs(captures: Sequence[Capture]) -> list[Steps]:
    """The runs among these whose requests only grow, each with at least three."""
    by_run: dict[str, list[Capture]] = {}
    for capture in captures:
        path = capture.path.partition("?")[0]
        body = capture.body
        held = any(body.get(name) for name in ("previous_response_id", "conversation", "thread"))
        if path in ("/v1/responses", "/v1/messages") and not held and body.get("tools"):
            by_run.setdefault(capture.name.rsplit(" ", 1)[0], []).append(capture)
    found = []
    for name, requests in by_run.items():
        arrays = [unmarked(history(each.body)) for each in requests]
        grown = [arrays[0]]
        for each in arrays[1:]:
            if len(each) > len(grown[-1]) and plain(each[: len(grown[-1])]) == plain(grown[-1]):
                grown.append(each)
        if len(grown) < 3:
            continue
        body = requests[0].body
        fields = {k: v for k, v in body.items() if k not in ("input", "messages", "context_management")}
        marks = "cache_control" in json.dumps(body.get("messages", "")) and "claude-code" in name
        added = [new[len(old) :] for old, new in zip(grown, grown[1:], strict=False)]
        path = requests[0].path.partition("?")[0]
        found.append(Steps(name, path, fields, grown[0], added, marks))
    return found


def plain(array: Sequence[Any]) -> list[Any]:
    """The same, a text as a string whether it came as one or as a block."""

    def flat(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        single = isinstance(content, list) and len(content) == 1 and set(content[0]) == {"type", "text"}
        return {**message, "content": content[0]["text"]} if single and content else message

    return [flat(each) for each in array]


def all_runs() -> list[Steps]:
    return runs(list(everything()) or list(sample()))
