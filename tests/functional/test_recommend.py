"""``weir policy recommend``: the policy that recorded traffic suggests, as YAML that loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from proxy.cli import main
from proxy.config.loading import load_config
from proxy.wire.counting import count_message
from tests.functional.harness import COUNTER, opening, prose, tool_step

Messages = list[dict[str, Any]]


def recommended(folder: Path, messages: Messages, *options: object) -> str:
    path = folder / "runs.jsonl"
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    result = CliRunner().invoke(main, ["policy", "recommend", str(path), "--window", "16384", *map(str, options)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def talk(turns: int, *, words: int = 60) -> Messages:
    messages = opening()
    for number in range(turns):
        messages.append({"role": "assistant", "content": prose(words, seed=2 * number)})
        messages.append({"role": "user", "content": prose(words, seed=2 * number + 1)})
    return messages


def loop(steps: int, *, words: int = 200, repeats: bool = False) -> Messages:
    messages = opening()
    for number in range(steps):
        messages += tool_step(0 if repeats else number, words=words)
    return messages


MIXED = [*talk(6, words=100), *tool_step(0, words=150), *tool_step(1, words=150), {"role": "user", "content": "And?"}]
MARKED = [*opening(), {"role": "user", "content": "DO_NOT_EVICT: the account is 4711-A."}]


@pytest.mark.requirement("A0.40")
@pytest.mark.parametrize(
    ("messages", "kind", "params", "then"),
    [
        (talk(6), "chat", {"scorer": "fifo"}, "nothing else"),
        (loop(8), "exploration", {"scorer": "type_based"}, "lru"),
        (MIXED, "heterogeneous", {"scorer": "priority"}, "hybrid"),
        (loop(8, repeats=True), "repeated outputs", {"scorer": "type_based"}, "priority"),
        (
            MARKED,
            "mission-critical",
            {"scorer": "hybrid", "weights": "equal"},
            "other weights, by what is recalled",
        ),
    ],
)
def test_what_to_evict_follows_from_the_traffic(
    tmp_path: Path, messages: Messages, kind: str, params: dict[str, str], then: str
) -> None:
    printed = recommended(tmp_path, messages)
    (tmp_path / "weir.yaml").write_text(printed + "default_policy: recommended\n")

    layers = load_config(tmp_path / "weir.yaml", env={}).policy().layers

    assert f"# {kind}: " in printed
    assert f"# then consider: {then}" in printed
    assert {name: layer.params for layer in layers if (name := layer.strategy) == "evict"} == {"evict": params}
    assert ("semantic_merge" in [layer.strategy for layer in layers]) == (kind == "repeated outputs")


@pytest.mark.requirement("A0.88", "A0.94", "A3.17")
def test_each_bucket_is_capped_by_what_nine_of_ten_requests_keep_to(tmp_path: Path) -> None:
    messages = loop(19, words=300)
    results = [count_message(each, COUNTER, model="") for each in messages if each["role"] == "tool"]

    printed = recommended(tmp_path, messages)
    found = json.loads(recommended(tmp_path, messages, "--json"))

    caps = {
        name: bucket["cap"] for name, bucket in yaml.safe_load(printed)["policies"]["recommended"]["buckets"].items()
    }
    # the newest of ten requests is above the cap, the nine before it are not
    taken = sum(results[:17]) / found["usable"]
    assert taken <= caps["tool_outputs"] < taken + 0.05
    assert (caps["system"], found["requests"], found["tools"]) == (0.05, 20, {"read_file": 1.0})
    assert "# tool results by tool: read_file 100%" in printed
