"""The ladder of compact, rung by rung, played without a model."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, replay, untouched
from policies.effects import Failed, Reply, Summarize, Summary
from policies.ledger import Cut, EditKind
from policies.memory.checkpoint import Checkpoint
from policies.messages import ToolCall, Transcript, protect
from policies.settings import ContextSettings, Layer, Summaries
from policies.summary.prompts import PROMPTS
from policies.tokens import CHARS4
from tests.policies.answering import Model
from tests.policies.play import (
    Said,
    assistant,
    decide,
    first_question,
    flow,
    play,
    result,
    step,
    system,
    talk,
    user,
    window,
    words,
)

compact = flow("compact")

NOTES = (
    'Goal: according to the user: "Why are orders late?"\n'
    "Left to do: say why orders are late.\n"
    'Open problems: according to the result of look: "depot D-17: E4411 carrier refused the manifest"\n'
    "Next step: read on."
)
MODEL = ContextSettings(summarizer="small-model", summaries=Summaries(wait=20))
RULE = "Never contact the customer directly."
FINDING = "depot D-17: E4411 carrier refused the manifest"
LOOP = "The depot was asked about the order again.\n" * 12


def history(steps: int = 40) -> list[Said | tuple[Said, ...]]:
    looks = [
        step(
            f'{{"order": "W{7000 + n}", "note": "{FINDING if n == 3 else ""} {words(330)}"}}', arguments=f'{{"n": {n}}}'
        )
        for n in range(steps)
    ]
    return [system("You help."), user("Why are orders late?"), user(RULE), *looks, user("And now?"), assistant("Hm.")]


TRANSCRIPT = talk(*history(), user("Go on."))


def bounds(
    transcript: Transcript = TRANSCRIPT,
    *,
    settings: ContextSettings = MODEL,
    known: ConversationState | None = None,
    reads: int = 0,
) -> Bounds:
    return bounds_for(
        transcript,
        settings=settings,
        budget=window(16_000),
        known=known or ConversationState(),
        counter=CHARS4,
        summarizer_input=reads or None,
    )


@pytest.mark.requirement("A1.10")
def test_with_a_number_of_messages_to_keep_all_before_them_become_one_summary() -> None:
    said = [(user, assistant)[n % 2](f"Message {n}. {words(330)}") for n in range(41)]
    transcript = talk(system("You help."), *said)
    limits = replace(bounds(transcript), layer=Layer(strategy="compact", params={"keep_messages": 10}))
    done = Model(lambda _: Summary(NOTES)).run(compact(untouched(transcript), limits))
    assert [p.index for p in done.pieces] == [0, 1, None, *range(32, 42)], "the task stays too"
    assert done.pieces[2].is_summary
    assert all(p.text is None for p in done.pieces if p.index is not None)


def compacted(*script: tuple[type[Summarize], Reply], limits: Bounds | None = None) -> tuple[Draft, Cut]:
    limits = limits or bounds()
    draft = replay(limits.transcript, limits.known, limits.protection)
    done = play(compact(draft, limits), *script)
    assert done.cut is not None
    assert done.tokens < draft.tokens
    return done, done.cut


def answered_with(reply: Summary | Failed) -> tuple[Draft, Cut, int]:
    """The draft, its cut, and how many questions were asked, where every one of them gets this reply."""
    model = Model(lambda _: reply)
    done = model.run(compact(untouched(TRANSCRIPT), bounds()))
    assert done.cut is not None
    return done, done.cut, len(model.asked)


@pytest.mark.requirement("A0.57", "A2.28")
def test_notes_of_the_model_stand_beside_the_extract() -> None:
    done, cut = compacted((Summarize, Summary(NOTES)))
    assert cut.origin == "model+extract"
    assert cut.narrative == NOTES
    assert NOTES.splitlines()[0] in cut.text
    assert RULE in cut.text
    assert Checkpoint.from_json(done.checkpoint or "").narrative == NOTES
    assert cut.tokens == 4 + CHARS4.count(cut.text)


@pytest.mark.requirement("D20")
def test_the_notes_are_asked_for_by_the_prompt_of_the_layer_or_else_of_the_policy() -> None:
    limits = bounds(settings=replace(MODEL, summaries=Summaries(prompt="handoff", wait=20)))
    purposes: list[str] = []
    for params in ({}, {"prompt": "plain"}):
        layer = Layer(strategy="compact", params=params)
        purposes.append(first_question(compact(untouched(TRANSCRIPT), replace(limits, layer=layer))).purpose)
    assert purposes == [PROMPTS["handoff"].purpose, PROMPTS["plain"].purpose]


@pytest.mark.requirement("P6", "A0.57")
@pytest.mark.parametrize(
    "reply",
    [
        Failed("timeout"),
        Failed("status_500"),
        Summary(""),
        Summary("<think>Where was I?"),
        Summary("All done."),
        Summary(words(40_000)),
        Summary("I'm sorry, but as a language model I cannot summarise what people say to one another, at all, ever."),
        Summary(NOTES, tool_calls=1),
        Summary(LOOP),
        Summary("".join(f"Point {n} of the many that were made here. " for n in range(400))),
    ],
    ids=["timeout", "error", "empty", "reasoning", "short", "not smaller", "refusal", "tool call", "loop", "long"],
)
def test_a_useless_answer_leaves_the_extract_alone(reply: Summary | Failed) -> None:
    _, cut, asked = answered_with(reply)
    assert asked <= 2
    assert (cut.origin, cut.narrative) == ("extract", "")
    assert RULE in cut.text
    plain = compacted(limits=bounds(settings=ContextSettings()))[1]
    without = cut.text.replace(f"(v{cut.version},", f"(v{plain.version},")
    assert without.splitlines()[1:-1] == plain.text.splitlines()[1:-1]
    assert cut.version == plain.version + 1, "the state was saved before the model was asked"


@pytest.mark.requirement("P6")
def test_an_answer_that_repeats_what_it_was_given_is_refused() -> None:
    draft, limits = untouched(TRANSCRIPT), bounds()
    asked = first_question(compact(draft, limits))
    assert answered_with(Summary(asked.prompt[900:3_300]))[1].origin == "extract"


@pytest.mark.requirement("D7")
def test_without_a_summarizer_no_model_is_asked() -> None:
    _, cut = compacted(limits=bounds(settings=ContextSettings()))
    assert cut.origin == "extract"


def test_a_window_without_room_for_notes_asks_no_model() -> None:
    transcript = talk(*history(8), user("Go on."))
    limits = bounds_for(transcript, settings=MODEL, budget=window(2_500), known=ConversationState(), counter=CHARS4)
    assert play(compact(untouched(transcript), limits)).cut is not None


@pytest.mark.requirement("A0.57", "P13")
def test_a_history_larger_than_the_summarisers_window_is_read_in_parts_and_merged() -> None:
    quiet = "Goal: find out why orders are late.\nDone: the notes of more orders were read and say nothing new."
    model = Model(lambda question: Summary(NOTES if "E4411" in question.prompt else quiet))
    done = model.run(compact(untouched(TRANSCRIPT), bounds(reads=2_500)))
    questions = model.asked
    assert done.cut is not None
    assert done.cut.origin == "model+extract"
    assert len(questions) > 6
    assert all(CHARS4.count(q.system + q.prompt) + q.max_tokens <= 2_500 for q in questions)
    read = "".join(q.prompt for q in questions)
    assert all(f"W{7000 + n}" in read for n in range(30))


@pytest.mark.requirement("P2", "A0.57")
def test_the_next_summary_extends_the_previous_one_and_reads_only_what_is_new() -> None:
    done, cut = compacted((Summarize, Summary(NOTES)))
    grown = talk(*history(), user("Go on."), *[step(words(300, f"fresh{n}")) for n in range(20)], user("Well?"))
    limits = bounds(grown, known=ConversationState(edits={e.key: e for e in done.edits.values()}, cuts=(cut,)))
    draft = replay(grown, limits.known, limits.protection)
    asked = first_question(compact(draft, limits))
    assert "E4411" in asked.prompt
    assert "fresh1" in asked.prompt
    assert "W7001" not in asked.prompt
    again, second = compacted((Summarize, Summary(NOTES.replace("read on", "read fresh pages"))), limits=limits)
    assert (second.version, second.origin) == (2, "model+extract")
    assert second.covers > cut.covers
    assert "read fresh pages" in second.text
    (one,), (two,) = done.condensed, again.condensed
    taken = [m.tokens for m in grown.messages[grown.head : grown.head + second.covers]]
    kept = {*cut.before, *cut.after, *second.before, *second.after}
    assert one.original_tokens == sum(t for i, t in enumerate(taken[: cut.covers]) if i not in kept)
    fresh = sum(t for i, t in enumerate(taken) if i >= cut.covers and i not in kept)
    assert two.original_tokens == cut.tokens + fresh, "what the first one took out is not counted again"
    _, failed = compacted((Summarize, Failed("timeout")), limits=limits)
    assert (failed.origin, failed.narrative) == ("previous+extract", NOTES)
    _, none = compacted(limits=replace(limits, settings=ContextSettings()))
    assert (none.origin, none.narrative) == ("previous+extract", NOTES)
    assert again.buckets()["summary"] == second.tokens


@pytest.mark.requirement("A0.57", "D9", "A2.28", "A2.7")
def test_the_result_is_head_task_summary_and_tail_in_order() -> None:
    done, cut = compacted((Summarize, Summary(NOTES)))
    order = [p.index for p in done.pieces]
    assert order[:3] == [0, 1, None]
    tail = order[3:]
    assert tail == list(range(tail[0] or 0, len(TRANSCRIPT.messages)))
    assert all(p.text is None for p in done.pieces if p.index is not None)
    assert cut.before == (0,)
    assert cut.after == ()
    assert cut.prefix == TRANSCRIPT.chain[cut.covers - 1]
    limits = bounds()
    assert sum(TRANSCRIPT.messages[i or 0].tokens for i in tail[:-1]) <= limits.shape.tail * limits.room


@pytest.mark.requirement("D9", "A0.38")
def test_what_is_pinned_or_newest_stays_word_for_word() -> None:
    said = history(30)
    call = (assistant("", ToolCall("call_0", "look", "{}")), result("the contract", keep=True))
    transcript = talk(*said[:9], call, *said[9:20], user("The last wish."), *said[20:33])
    done, cut = compacted(limits=bounds(transcript, settings=ContextSettings()))
    pieces = {p.index: p for p in done.pieces}
    protection = protect(transcript)
    assert protection.all <= set(pieces)
    assert all(pieces[i].text is None for i in protection.all)
    current = protection.current or 0
    order = [p.index for p in done.pieces]
    assert order.index(None) == order.index(current) - 1
    assert cut.after == (current - 1,)
    assert len(cut.before) == 3


@pytest.mark.requirement("D9", "A2.9")
def test_every_pending_call_keeps_the_results_it_has() -> None:
    calls = tuple(ToolCall(f"c{n}", "look", "{}") for n in range(3))
    transcript = talk(*history(), user("Go on."), assistant("", *calls), result("one", "c1"))
    done, _ = compacted(limits=bounds(transcript, settings=ContextSettings()))
    assert [p.index for p in done.pieces][-2:] == [len(transcript.messages) - 2, len(transcript.messages) - 1]


def newest_step(tokens: int) -> tuple[Bounds, Draft, Cut]:
    """A batch whose newest step holds a result of so many words, and a small one."""
    calls = ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}")
    newest = (assistant("", *calls), result(words(tokens), "a"), result("small", "b"))
    limits = bounds(talk(*history(20), user("Go on."), newest), settings=ContextSettings())
    return limits, *compacted(limits=limits)


@pytest.mark.requirement("D9")
def test_the_newest_step_stays_whole_while_it_fits_beside_the_summary() -> None:
    limits, done, cut = newest_step(9_000)
    assert [p.kind for p in done.pieces[-2:]] == [None, None]
    assert done.pieces[-2].tokens > (limits.trigger - limits.fixed - cut.tokens) / 2
    assert done.tokens <= limits.trigger


@pytest.mark.requirement("D9")
def test_results_of_a_newest_step_that_does_not_fit_are_cut_no_further_than_the_window_needs() -> None:
    limits, done, cut = newest_step(30_000)
    assert [p.kind for p in done.pieces[-2:]] == [EditKind.INGEST_CAP, None]
    left = limits.safe_limit - limits.fixed - cut.tokens
    assert 0.9 * left < done.pieces[-2].tokens <= left


@pytest.mark.requirement("P2")
def test_the_same_history_gives_the_same_bytes() -> None:
    assert compacted((Summarize, Summary(NOTES))) == compacted((Summarize, Summary(NOTES)))


def test_where_everything_is_protected_nothing_is_asked_and_nothing_changes() -> None:
    transcript = talk(system("s"), user("task"), *step(words(20_000)))
    draft = untouched(transcript)
    assert play(compact(draft, bounds(transcript))) is draft


@pytest.mark.requirement("D21", "A0.96")
@pytest.mark.parametrize("tokens", [4_000, 8_000, 32_000, 128_000])
def test_summary_and_tail_stay_within_their_shares_of_room(tokens: int) -> None:
    transcript = talk(*history(tokens // 330), user("Go on."))
    limits = bounds_for(
        transcript, settings=ContextSettings(), budget=window(tokens), known=ConversationState(), counter=CHARS4
    )
    done = play(compact(untouched(transcript), limits))
    assert done.cut is not None
    assert done.cut.tokens <= min(limits.shape.extract * limits.room, 64_000) + 60
    assert done.tokens <= limits.low_water or limits.shape.window == 6_144
    assert done.tokens <= limits.trigger


def test_a_summary_takes_what_the_limit_leaves_before_a_harder_try_leaves_a_quarter() -> None:
    """A newest step that takes nearly all of the room is not to cost the summary everything."""
    call = ToolCall("a", "look", "{}")
    old = [
        each for n in range(30) for each in (user(f"Order W-{n}4471 goes to Riga."), assistant(f"Noted, W-{n}4471."))
    ]
    transcript = talk(
        system(words(1_240)), user("task"), *old, user("now"), (assistant("", call), result(words(270), "a"))
    )
    decision = decide(transcript, budget=window(2_056, reserve=64, headroom=100))
    assert [report.layer for report in decision.trail if report.kept] == ["compact"]
    summary = next(piece.text for piece in decision.pieces or () if piece.kind is None and piece.text)
    assert "4471" in summary


def test_a_summary_is_given_all_that_its_frame_leaves_where_a_window_is_filled() -> None:
    old = [each for n in range(300) for each in (user(f"W-{n}4471?"), assistant(f"W-{n}8213."))]
    transcript = talk(system(words(1_240)), user("task"), *old, user("now"))
    limits = bounds_for(
        transcript,
        settings=ContextSettings(),
        budget=window(2_056, reserve=64, headroom=100),
        known=ConversationState(),
        counter=CHARS4,
    )
    done = play(compact(untouched(transcript), limits))
    assert limits.low_water - 10 <= done.tokens <= limits.low_water
