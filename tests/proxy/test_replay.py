import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from policies.quality.advise import OPENAI_CLIFF, PROVIDERS, TokenPrices, recommend
from proxy.replay.report import MAX_TICKS, ReplayReport, render_report, scale

from policies.settings import ContextSettings, Mode
from proxy.models.facts import BadPrices, ModelFacts, PriceList, price_list
from proxy.replay.play import Replayed, ScenarioResult, Tally, replay
from proxy.replay.scenarios import (
    SLIDING,
    UNMANAGED,
    Conditions,
    Forwarded,
    Managed,
    SlidingWindow,
    TrafficCount,
    advice_for,
    advised,
    pace_of,
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
) -> dict[str, ScenarioResult]:
    done = run(script(messages, facts=facts), *(policies or (BALANCED,)), under=conditions(window))
    return {result.name: result for result in done.scenarios}


def run(read: Script, *policies: ContextSettings, under: Conditions) -> Replayed:
    async def play() -> Replayed:
        async with store_in_memory() as store:
            return await replay(read, policies, under, PRICES, store, keep_steps=True)

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
        ("{", "neither an object nor an array"),
        ("nonsense", "neither an object nor an array"),
        ("7", "neither an object nor an array"),
        ("{}", "no messages"),
        ('{"messages": 7}', "messages should be an array"),
        ('{"messages": [{"content": "x"}]}', "message 0 should be an object with a role"),
        ("[1, 2]", "neither an object nor an array"),
        ('[{"role": "user"}, 7]', "message 1 should be an object with a role"),
    ],
)
def test_a_bad_line_is_named_after_the_good_ones_were_given(tmp_path: Path, bad: str, says: str) -> None:
    path = written(tmp_path, json.dumps({"messages": TALK}) + "\n" + bad + "\n")
    places = read_recordings(path)

    assert next(places).recording.id == "1"
    with pytest.raises(BadRecording, match=re.escape(f"{path}, line 2: ") + ".*" + re.escape(says)):
        next(places)


def test_a_document_that_breaks_off_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, '[\n {"role": "user",\n "content" "hi"}\n]')

    with pytest.raises(BadRecording, match=re.escape(f"{path}, line 3: ")):
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


def test_unmanaged_requests_cost_a_read_of_the_prefix_and_a_write_of_the_rest() -> None:
    result = played(agent(6))[UNMANAGED]
    sizes = [step.after for step in result.steps]
    priming = 3  # of each request, no part of the prefix

    expected = 1.25 * sizes[0]
    for before, now in zip(sizes, sizes[1:], strict=False):
        expected += 0.1 * (before - priming) + 1.25 * (now - before + priming)

    assert result.tally.cost == pytest.approx(expected)
    assert result.tally.ratio == 1.0
    assert result.tally.batches == 0


@pytest.mark.requirement("A0.2", "P14")
def test_fifty_steps_save_tokens_and_money_as_recomputed_from_what_was_forwarded() -> None:
    results = played(agent(50))
    managed, raw = results["balanced"], results[UNMANAGED]

    sent = sum(step.after for step in managed.steps)
    paid = sum(0.1 * step.reused + 1.25 * (step.after - step.reused) for step in managed.steps)

    assert managed.tally.saved == raw.tally.tokens - sent > 0
    assert managed.tally.cost == pytest.approx(paid)
    assert managed.tally.values()["cost_saved"] == pytest.approx(raw.tally.cost - paid)
    assert raw.tally.cost - paid > 0
    assert (managed.tally.requests, managed.tally.fit, managed.tally.refused) == (50, 50, 0)
    assert raw.tally.fit < 50


def test_prefix_reuse_is_that_of_the_arrays_that_would_be_sent() -> None:
    read = script(agent(30))
    bodies = []
    for sent in forwarded(read):
        assert sent.pieces is not None
        bodies.append([json.loads(bytes(raw)) for raw in read.rendered(sent.pieces)])

    def count(message: dict[str, Any]) -> int:
        return script([message]).messages[0].tokens

    reuse = played(agent(30))["balanced"].tally.reuse
    assert reuse == pytest.approx(prefix_reuse(bodies, count), abs=0.002)
    assert 0.5 < reuse < 1.0


def test_a_summary_that_would_be_prepared_after_an_answer_counts_as_asked_for() -> None:
    written = replace(BALANCED, name="written", summarizer="notes")
    results = played(agent(40), BALANCED, written)
    assert results["balanced"].tally.asked == 0
    assert results["written"].tally.asked >= results["written"].tally.batches > 0


def test_between_two_batches_every_request_begins_with_the_one_before() -> None:
    steps = played(agent(40))["balanced"].steps

    for before, now in zip(steps, steps[1:], strict=False):
        assert now.broke == (now.reused < before.after - 3)
    assert 0 < sum(step.broke for step in steps) < 10
    assert {step.number for step in steps if step.broke} <= {step.number for step in steps if step.acted}


def test_a_sliding_window_pays_more_than_it_saves_in_tokens() -> None:
    results = played(agent(40))

    assert results[SLIDING].tally.tokens < results[UNMANAGED].tally.tokens
    assert results[SLIDING].tally.cost > results[UNMANAGED].tally.cost > results["balanced"].tally.cost
    assert results["balanced"].tally.against_sliding == results["balanced"].tally.cost / results[SLIDING].tally.cost


def test_a_sliding_window_never_begins_with_an_orphaned_result() -> None:
    read = script(agent(40))

    for sent in forwarded(read, sliding=True):
        assert sent.pieces is not None
        roles = [read.messages[p.index].role for p in sent.pieces if p.index is not None]
        assert roles[:1] == ["system"]
        assert roles[1] != "tool"
        assert sent.tokens <= sent.limit


def test_a_policy_that_is_off_forwards_what_came() -> None:
    results = played(agent(20), ContextSettings(name="off", mode=Mode.OFF))

    assert results["off"].steps == tuple(
        replace(step, seconds=off.seconds)
        for step, off in zip(results[UNMANAGED].steps, results["off"].steps, strict=True)
    )


def test_every_token_of_a_request_is_in_one_bucket() -> None:
    for result in played(agent(30)).values():
        for step in result.steps:
            assert sum(step.buckets.values()) == step.after


def test_a_request_that_cannot_be_made_to_fit_is_counted_as_refused_and_costs_nothing() -> None:
    huge = [{"role": "system", "content": prose(4_000, seed=1)}, *TALK]

    result = played(huge, window=2_048)["balanced"]

    assert (result.tally.requests, result.tally.fit, result.tally.refused) == (1, 0, 1)
    assert (result.tally.cost, result.tally.tokens, result.steps[0].action) == (0.0, 0, "refused")


def test_the_same_conversation_is_played_the_same_way_twice() -> None:
    first, second = (
        [step.values() for result in played(agent(30)).values() for step in result.steps] for _ in range(2)
    )

    assert first == second


def test_a_fact_in_an_old_result_is_out_of_the_window_and_in_the_archive() -> None:
    messages = agent(40, said=f"see {MARKER} ")
    at = len(messages) - 1
    facts = [
        Fact(needles=(MARKER.upper(),), needed_at=(4, at)),
        Fact(needles=("never said by anybody",), needed_at=(at,)),
    ]

    results = played(messages, facts=facts)
    kept = {name: result.tally.retention for name, result in results.items()}

    assert (kept[UNMANAGED].needed, kept[UNMANAGED].kept) == (2, 2)
    assert (kept[SLIDING].needed, kept[SLIDING].kept, kept[SLIDING].recoverable) == (2, 1, 1)
    assert (kept["balanced"].needed, kept["balanced"].recoverable) == (2, 2)


def test_a_fact_that_is_needed_at_the_end_is_asked_for_in_a_request_that_does_not_count() -> None:
    messages = [*agent(3)[:-1], {"role": "assistant", "content": f"the number is {MARKER}"}]
    facts = [Fact(needles=(MARKER,), superseded=("old",))]

    results = played(messages, facts=facts)

    assert results["balanced"].tally.retention.kept == 1
    assert results["balanced"].tally.requests == len(results["balanced"].steps) == 3


def test_a_superseded_value_without_the_new_one_is_stale() -> None:
    messages = [
        {"role": "user", "content": f"Call {MARKER}. {prose(1500, seed=1)}"},
        {"role": "assistant", "content": "Noted."},
        *({"role": role, "content": prose(300, seed=i)} for i in range(3) for role in ("user", "assistant")),
        {"role": "user", "content": "It was once room 17."},
    ]
    facts = [Fact(needles=(MARKER,), superseded=("room 17",))]

    sliding = played(messages, window=2_048, facts=facts)[SLIDING].tally.retention

    assert (sliding.needed, sliding.kept, sliding.stale) == (1, 0, 1)


def test_the_facts_of_a_file_are_read_in_every_known_form(tmp_path: Path) -> None:
    facts = [
        {"value": "abc", "needed_at": [1]},
        {"needles": ["x", "y"], "superseded": ["z"], "question": "?"},
        {"value": None},
        "no fact",
        {"needles": "wrong"},
    ]
    path = written(tmp_path, json.dumps({"messages": TALK, "meta": {"facts": facts}}))

    assert next(read_recordings(path)).recording.facts == (
        Fact(needles=("abc",), needed_at=(1,)),
        Fact(needles=("x", "y"), superseded=("z",)),
    )


def test_a_hundred_steps_are_played() -> None:
    read = script(agent(100))

    tally = run(read, BALANCED, under=conditions()).scenarios[2].tally

    assert tally.requests == 100
    assert 0 < tally.slowest <= tally.seconds


def test_tallies_add_up_and_keep_the_largest() -> None:
    one, two = (played(agent(steps))["balanced"].tally for steps in (10, 40))
    both = Tally()
    both.add(one)
    both.add(two)

    assert (both.conversations, both.requests) == (2, 50)
    assert both.cost == one.cost + two.cost
    assert both.largest == max(one.largest, two.largest)
    assert both.peak == max(one.peak, two.peak) == two.peak > 1.0
    assert one.early == two.early == 1.0


@pytest.mark.requirement("A3.17", "A0.40")
def test_traffic_is_counted_by_bucket_and_tool_with_repetitions() -> None:
    messages = opening()
    for number in (1, 2, 1):
        messages += tool_step(number)
    count = TrafficCount()
    count.add(script([*messages, *TALK[1:]]))

    seen = count.traffic

    assert (seen.conversations, seen.requests, seen.turns) == (1, 4, 1)
    assert [(tool.name, tool.calls) for tool in seen.tools] == [("read_file", 3)]
    assert seen.repeated_share == pytest.approx(1 / 3, abs=0.05)
    assert seen.tokens == script([*messages, *TALK[1:]]).transcript(len(messages) + 1).tokens
    assert recommend(seen).kind == "repeated outputs"


def test_advice_is_drawn_from_how_a_conversation_grows() -> None:
    read = script(agent(60, words=600))
    pace = pace_of(read)
    far = conditions(128_000)

    advice = advice_for(pace, BALANCED, far, PRICES)
    results = run(read, BALANCED, advised(BALANCED, advice), under=far).scenarios

    assert pace.growth == pytest.approx(950, abs=150)
    assert 150 < pace.fixed < 250
    assert advice.shape.trigger == 0.40
    assert results[2].tally.batches == 0
    assert results[3].name == "balanced, advised"
    assert results[3].tally.batches > 0


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


class Page(HTMLParser):
    """Tags that are open, the elements seen, and their attributes."""

    VOID = frozenset({"meta", "br", "line", "rect", "path", "polygon"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag in ("rect", "polygon") and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


EVIL = '<script>alert("1")</script>&\'"'


def page() -> str:
    messages = agent(40)
    recording = replace(recording_of(messages, name=EVIL), line=1)
    read = Script(recording, counter=COUNTER, model="")
    policy = replace(BALANCED, name=f"p{EVIL}")
    done = run(read, policy, under=conditions())
    totals = {result.name: result.tally for result in done.scenarios}
    prices = PriceList(prices=PRICES, dollars=False, source=EVIL)
    report = ReplayReport(title=EVIL, window=8_192, reserve=512, prices=prices, totals=totals, drawn=(done,))
    return render_report(report)


def test_the_report_is_one_well_formed_page_that_loads_and_runs_nothing() -> None:
    text = page()
    parsed = Page(text)

    assert parsed.open == []
    tags = {tag for tag, _ in parsed.seen}
    assert {"svg", "table", "section", "polygon"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object", "foreignobject"}
    names = {name for _, attributes in parsed.seen for name in attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "href", "style"})
    assert "url(" not in text
    assert "http:" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text
    assert EVIL in "".join(parsed.text)


def test_the_report_draws_every_number_inside_its_frame() -> None:
    for tag, attributes in Page(page()).seen:
        for name in ("d", "points"):
            numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", attributes.get(name) or "")]
            assert all(0 <= n <= 960 for n in numbers), (tag, attributes)
        for name in ("x", "y", "x1", "x2", "y1", "y2", "width", "height"):
            if tag in ("rect", "line", "text") and name in attributes:
                assert 0 <= float(attributes[name] or "") <= 960
    assert "nan" not in page().replace(EVIL, "")


def test_the_report_marks_the_requests_on_which_weir_acted() -> None:
    steps = played(agent(40))["balanced"].steps
    acted = [step.number for step in steps if step.broke and step.acted]

    marks = re.findall(r'<polygon class="mark" points="[^"]*"><title>request (\d+): [^<]*</title>', page())

    assert [int(number) for number in marks] == acted
    assert acted


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded conversations are not on this machine")
def test_recorded_sessions_in_a_small_window_keep_their_facts_and_their_prefix() -> None:
    place = next(read_recordings(SHARED / "tau_airline_long.jsonl"))
    recording: Recording = place.recording

    result = run(Script(recording, counter=COUNTER, model=""), BALANCED, under=conditions()).scenarios[2]

    assert result.tally.fit == result.tally.requests == len(recording.requests)
    assert result.tally.reuse > 0.85
    assert result.tally.ratio < 0.78
    assert result.tally.retention.kept >= 0.95 * result.tally.retention.needed > 0
    assert result.tally.retention.recoverable == result.tally.retention.needed
