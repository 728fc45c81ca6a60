import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from policies.quality.prices import TokenPrices
from policies.settings import ContextSettings
from proxy.features.replay.play import SLIDING, UNMANAGED, Tally, replay
from proxy.features.replay.scenarios import (
    Conditions,
    Forwarded,
    Managed,
    SlidingWindow,
    store_in_memory,
)
from proxy.features.replay.script import BadRecording, Fact, Script, read_recordings, recording_of
from tests.functional.harness import COUNTER, opening, prose, tool_step

pytestmark = pytest.mark.slow

PRICES = TokenPrices(1.0, 0.1, 1.25, 5.0)
BALANCED = ContextSettings()
MARKER = "invoice-88231-zulu"


def agent(steps: int, *, words: int = 280, said: str = "") -> list[dict[str, Any]]:
    """An agent's run of so many requests, ended by an answer."""
    messages = opening()
    for number in range(steps - 1):
        messages += tool_step(number, words=words, text=said + prose(words, seed=number) if number == 0 else None)
    return [*messages, {"role": "assistant", "content": "Done."}]


def conditions(window: int = 8_192, *, max_tokens: int = 512) -> Conditions:
    return Conditions(counter=COUNTER, window=window, max_tokens=max_tokens)


def script(messages: list[dict[str, Any]], *, facts: Iterable[Fact] = (), tools: object = None) -> Script:
    recording = recording_of(messages, name="one", facts=tuple(facts), tools=tools)
    return Script(recording, counter=COUNTER, model="")


def played(
    messages: list[dict[str, Any]], *policies: ContextSettings, window: int = 8_192, facts: Iterable[Fact] = ()
) -> Mapping[str, Tally]:
    return run(script(messages, facts=facts), *(policies or (BALANCED,)), under=conditions(window))


def run(read: Script, *policies: ContextSettings, under: Conditions) -> Mapping[str, Tally]:
    async def play() -> Mapping[str, Tally]:
        async with store_in_memory() as store:
            return await replay(read, policies, under, PRICES, store)

    return asyncio.run(play())


def forwarded(read: Script, *, sliding: bool = False) -> list[Forwarded]:
    async def play() -> list[Forwarded]:
        async with store_in_memory() as store:
            window = SlidingWindow(conditions().budget(BALANCED))
            scenario = window if sliding else Managed(BALANCED, conditions(), store)
            return [await scenario.forward(read, request.length) for request in read.requests]

    return asyncio.run(play())


def written(folder: Path, text: str) -> Path:
    path = folder / "runs.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "truncated"),
        ("nonsense", "malformed"),
        ("7", "Expected `object`, got `int`"),
        ("{}", "missing required field `messages`"),
        ('{"messages": 7}', "Expected `array`, got `int` - at `$.messages`"),
        ('{"messages": [{"content": "x"}]}', "message 0 should be an object with a role"),
        ("[1, 2]", "message 0 should be an object with a role"),
        ('[{"role": "user"}, 7]', "message 1 should be an object with a role"),
        ('{"messages": [], "meta": {"facts": [7]}}', "at `$.meta.facts[0]`"),
    ],
)
def test_a_bad_line_is_named_after_the_good_ones_were_given(tmp_path: Path, bad: str, says: str) -> None:
    path = written(tmp_path, json.dumps({"messages": TALK}) + "\n" + bad + "\n")
    places = read_recordings(path)

    assert next(places).recording.id == "1"
    with pytest.raises(BadRecording, match=re.escape(f"{path}, line 2: ") + ".*" + re.escape(says)):
        next(places)


def test_a_document_that_breaks_off_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, '[\n {"role": "user",\n "content" "hi"}\n]')

    with pytest.raises(BadRecording, match=re.escape(f"{path}: ") + ".*malformed"):
        list(read_recordings(path))


def test_a_sliding_window_never_begins_with_an_orphaned_result() -> None:
    read = script(agent(40))

    for sent in forwarded(read, sliding=True):
        assert sent.pieces is not None
        roles = [read.messages[p.index].role for p in sent.pieces if p.index is not None]
        assert roles[:1] == ["system"]
        assert roles[1] != "tool"


def test_a_fact_in_an_old_result_is_out_of_the_window_and_in_the_archive() -> None:
    messages = agent(40, said=f"see {MARKER} ")
    at = len(messages) - 1
    facts = [
        Fact(needles=(MARKER.upper(),), needed_at=(4, at)),
        Fact(needles=("never said by anybody",), needed_at=(at,)),
    ]

    results = played(messages, facts=facts)
    kept = {name: result.retention for name, result in results.items()}

    assert (kept[UNMANAGED].needed, kept[UNMANAGED].kept) == (2, 2)
    assert (kept[SLIDING].needed, kept[SLIDING].kept, kept[SLIDING].recoverable) == (2, 1, 1)
    assert (kept["balanced"].needed, kept["balanced"].recoverable) == (2, 2)


def test_a_superseded_value_without_the_new_one_is_stale() -> None:
    messages = [
        {"role": "user", "content": f"Call {MARKER}. {prose(1500, seed=1)}"},
        {"role": "assistant", "content": "Noted."},
        *({"role": role, "content": prose(300, seed=i)} for i in range(3) for role in ("user", "assistant")),
        {"role": "user", "content": "It was once room 17."},
    ]
    facts = [Fact(needles=(MARKER,), superseded=("room 17",))]

    sliding = played(messages, window=2_048, facts=facts)[SLIDING].retention

    assert (sliding.needed, sliding.kept, sliding.stale) == (1, 0, 1)
