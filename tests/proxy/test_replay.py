import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.quality.prices import OPENAI_CLIFF, PROVIDERS, TokenPrices
from policies.settings import ContextSettings, Mode
from proxy.dashboard.charts import MAX_TICKS, scale
from proxy.models.facts import BadPrices, ModelFacts, price_list
from proxy.replay.play import SLIDING, UNMANAGED, Tally, replay
from proxy.replay.scenarios import (
    Conditions,
    Forwarded,
    Managed,
    SlidingWindow,
    store_in_memory,
)
from proxy.replay.script import BadRecording, Fact, Recording, Script, read_recordings, recording_of
from tests.functional.harness import COUNTER, opening, prefix_reuse, prose, tool_step

pytestmark = pytest.mark.slow

PRICES = TokenPrices(1.0, 0.1, 1.25, 5.0)
BALANCED = ContextSettings()
MARKER = "invoice-88231-zulu"
SHARED = Path(__file__).parents[3] / "shared" / "data"


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
    ("text", "ids"),
    [
        (json.dumps({"messages": TALK, "meta": {"id": "a"}}) + "\n\n" + json.dumps({"messages": TALK}), ["a", "3"]),
        (json.dumps(TALK) + "\n" + json.dumps(TALK), ["1", "2"]),
        (json.dumps(TALK, indent=2), ["1"]),
        (json.dumps([{"messages": TALK}, {"messages": TALK, "meta": {"id": "b"}}], indent=1), ["1", "b"]),
        (json.dumps([{"messages": TALK}, {"messages": TALK}]), ["1", "2"]),
        (json.dumps({"messages": TALK}, indent=1), ["1"]),
    ],
    ids=["lines", "lines of arrays", "an array", "an array of conversations", "the same on one line", "an object"],
)
def test_conversations_are_read_from_lines_and_from_one_document(tmp_path: Path, text: str, ids: list[str]) -> None:
    found = [place.recording for place in read_recordings(written(tmp_path, text))]

    assert [recording.id for recording in found] == ids
    assert all([dict(value) for value in recording.values] == TALK for recording in found)
    assert all(recording.requests == (1,) for recording in found)


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


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_holds_no_conversations(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRecording, match="no conversations"):
        list(read_recordings(written(tmp_path, text)))


def test_every_answer_of_the_assistant_was_one_request_and_an_open_end_is_one_too() -> None:
    closed = recording_of(agent(3), name="closed")
    opened = recording_of(agent(3)[:-1], name="open")

    assert closed.requests == (2, 4, 6)
    assert opened.requests == (2, 4, 6)
    assert recording_of(agent(3)[:-2], name="calls").requests == (2, 4)


@pytest.mark.requirement("A0.2", "P14")
def test_fifty_steps_save_tokens_and_money() -> None:
    results = played(agent(50))
    managed, raw = results["balanced"], results[UNMANAGED]

    assert managed.saved == raw.tokens - managed.tokens > 0
    assert managed.cost == pytest.approx(0.1 * managed.reused + 1.25 * (managed.tokens - managed.reused))
    assert managed.cost < raw.cost
    assert (managed.requests, managed.fit, managed.refused) == (50, 50, 0)
    assert raw.fit < 50


def test_prefix_reuse_is_that_of_the_arrays_that_would_be_sent() -> None:
    read = script(agent(30))
    bodies = []
    for sent in forwarded(read):
        assert sent.pieces is not None
        bodies.append([json.loads(bytes(raw)) for raw in read.rendered(sent.pieces)])

    def count(message: dict[str, Any]) -> int:
        return script([message]).messages[0].tokens

    reuse = played(agent(30))["balanced"].reuse
    assert reuse == pytest.approx(prefix_reuse(bodies, count), abs=0.002)
    assert 0.5 < reuse < 1.0


def test_a_summary_that_would_be_prepared_after_an_answer_counts_as_asked_for() -> None:
    written = replace(BALANCED, name="written", summarizer="notes")
    results = played(agent(40), BALANCED, written)
    assert results["balanced"].asked == 0
    assert results["written"].asked >= results["written"].batches > 0


def test_a_sliding_window_pays_more_than_it_saves_in_tokens() -> None:
    results = played(agent(40))

    assert results[SLIDING].tokens < results[UNMANAGED].tokens
    assert results[SLIDING].cost > results[UNMANAGED].cost > results["balanced"].cost
    assert results["balanced"].against_sliding == results["balanced"].cost / results[SLIDING].cost


def test_a_sliding_window_never_begins_with_an_orphaned_result() -> None:
    read = script(agent(40))

    for sent in forwarded(read, sliding=True):
        assert sent.pieces is not None
        roles = [read.messages[p.index].role for p in sent.pieces if p.index is not None]
        assert roles[:1] == ["system"]
        assert roles[1] != "tool"


def test_a_policy_that_is_off_forwards_what_came() -> None:
    results = played(agent(20), ContextSettings(name="off", mode=Mode.OFF))

    assert results["off"].values() == results[UNMANAGED].values()


def test_a_request_that_cannot_be_made_to_fit_is_counted_as_refused_and_costs_nothing() -> None:
    huge = [{"role": "system", "content": prose(4_000, seed=1)}, *TALK]

    result = played(huge, window=2_048)["balanced"]

    assert (result.requests, result.fit, result.refused) == (1, 0, 1)
    assert (result.cost, result.tokens, result.refused_by) == (0.0, 0, {"total": 1})


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


def test_a_fact_that_is_needed_at_the_end_is_asked_for_in_a_request_that_does_not_count() -> None:
    messages = [*agent(3)[:-1], {"role": "assistant", "content": f"the number is {MARKER}"}]
    facts = [Fact(needles=(MARKER,), superseded=("old",))]

    results = played(messages, facts=facts)

    assert results["balanced"].retention.kept == 1
    assert results["balanced"].requests == 3


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


def test_the_facts_of_a_file_are_read_in_every_known_form(tmp_path: Path) -> None:
    facts = [
        {"value": "abc", "needed_at": [1]},
        {"needles": ["x", "y"], "superseded": ["z"], "question": "?"},
        {"value": None},
        {"value": 17},
    ]
    path = written(tmp_path, json.dumps({"messages": TALK, "meta": {"facts": facts}}))

    assert next(read_recordings(path)).recording.facts == (
        Fact(needles=("abc",), needed_at=(1,)),
        Fact(needles=("x", "y"), superseded=("z",)),
        Fact(needles=("17",)),
    )


def test_tallies_add_up_and_keep_the_largest() -> None:
    one, two = (played(agent(steps))["balanced"] for steps in (10, 40))
    both = Tally()
    both.add(one)
    both.add(two)

    assert (both.conversations, both.requests) == (2, 50)
    assert both.cost == one.cost + two.cost
    assert both.largest == max(one.largest, two.largest)
    assert both.peak == max(one.peak, two.peak) == two.peak > 1.0
    assert one.early == two.early == 1.0


def test_prices_come_from_what_was_stated_then_from_the_model_then_from_a_provider() -> None:
    facts = ModelFacts(input_price=2e-6, cache_read_price=2e-7, output_price=8e-6, cliff=OPENAI_CLIFF)

    stated = price_list("1,0.1,1.25,5", model="m", facts=facts)
    named = price_list("openai", model="m", facts=facts)
    models = price_list(None, model="gpt-5.6-mini", facts=facts)
    default = price_list(None, model="", facts=ModelFacts())

    assert stated.dollars
    assert stated.prices.cache_write == pytest.approx(1.25e-6)
    assert (named.dollars, named.prices) == (False, PROVIDERS["openai"])
    assert (models.dollars, models.prices.cache_write, models.prices.cliff) == (True, 2e-6, OPENAI_CLIFF)
    assert (default.dollars, default.prices) == (False, PROVIDERS["anthropic"])
    assert [models.shown(cost) for cost in (1234.5, 0.01234)] == ["$1,234.50", "$0.0123"]
    assert default.shown(12_345.0) == "12.3k"


@pytest.mark.parametrize("stated", ["nobody", "1,2,3", "1,2,3,x", "-1,0,0,0", "nan,1,1,1", ""])
def test_prices_that_nobody_can_read_are_refused(stated: str) -> None:
    with pytest.raises(BadPrices, match="four dollar prices"):
        price_list(stated, model="", facts=ModelFacts())


@pytest.mark.parametrize("highest", [0, 0.0003, 0.9, 1, 7, 99, 100, 101, 8_192, 262_144, 3e9])
def test_a_scale_is_round_and_reaches_over_the_highest_value(highest: float) -> None:
    ticks = scale(highest)

    assert ticks[0] == 0
    assert ticks[-1] >= highest
    assert 2 <= len(ticks) <= MAX_TICKS + 1
    assert ticks[-2] < max(highest, 1e-9)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded conversations are not on this machine")
def test_recorded_sessions_in_a_small_window_keep_their_facts_and_their_prefix() -> None:
    place = next(read_recordings(SHARED / "tau_airline_long.jsonl"))
    recording: Recording = place.recording

    result = run(Script(recording, counter=COUNTER, model=""), BALANCED, under=conditions())["balanced"]

    assert result.fit == result.requests == len(recording.requests)
    assert result.reuse > 0.85
    assert result.ratio < 0.78
    assert result.retention.kept >= 0.95 * result.retention.needed > 0
    assert result.retention.recoverable == result.retention.needed
