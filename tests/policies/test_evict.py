"""What may be evicted, in which order, and what stands in its place."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import ToolCall, Transcript, protect
from policies.scoring.eviction import SCORERS, ContentType
from policies.settings import ContextSettings, Layer, Memory, Param
from policies.strategies.clear import candidates
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, result, step, strategy, system, talk, user, window, words
from tests.profile import tried

evict = strategy("evict")

PLAIN = ContextSettings(margin=0.0, headroom=0, reserve_floor=0, rot_soft_tokens=None)
ALL = tuple(kind.value for kind in ContentType)


def evicted(transcript: Transcript, *, target: int, policy: ContextSettings = PLAIN, **params: Param) -> Draft:
    bounds = bounds_for(transcript, settings=policy, budget=window(100_000), known=ConversationState(), counter=CHARS4)
    layer = Layer(strategy="evict", params=params)
    return evict(untouched(bounds.transcript), replace(bounds, layer=layer, aim=target))


def numbered(count: int, tokens: int = 300) -> list[Said]:
    said: list[Said] = []
    for n in range(count):
        said += step(f"file{n}.py {words(tokens)}", tool="read", arguments=f'{{"path": "src/f{n}.py"}}')
    return said


def placed(draft: Draft, said: list[Said]) -> list[str]:
    """The call that each evicted result answered, in the order of the array."""
    return [said[i - 1].calls[0].arguments for i in sorted(draft.edits)]


@pytest.mark.requirement("A0.37", "A0.49", "A0.152")
@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_frees_what_is_asked_and_little_more(name: str) -> None:
    transcript = talk(user("task"), *numbered(20), user("next"))
    target = transcript.tokens - 1_500
    done = evicted(transcript, target=target, scorer=name)
    assert target - 320 <= done.tokens <= target
    assert {e.kind for e in done.edits.values()} == {EditKind.EVICT}


@pytest.mark.requirement("A0.30")
def test_fifo_lets_the_oldest_go_first() -> None:
    said = [user("task"), *numbered(10), user("next")]
    done = evicted(talk(*said), target=talk(*said).tokens - 700, scorer="fifo")
    assert sorted(done.edits) == [2, 4, 6]


@pytest.mark.requirement("A0.31")
def test_lru_keeps_an_old_result_that_was_used_a_moment_ago() -> None:
    said = [user("task"), *numbered(10)]
    said[2] = result(f"the session token is TK-99817 {words(300)}", "call_0")
    said += [assistant("Using TK-99817 now."), user("next")]
    done = evicted(talk(*said), target=talk(*said).tokens - 1_500, scorer="lru", half_life=5)
    assert 2 not in done.edits
    assert min(done.edits) == 4


@pytest.mark.requirement("A0.4")
def test_a_result_that_a_later_call_of_the_same_tool_replaced_goes_before_all_others() -> None:
    said = [user("task"), *numbered(6)]
    same = step(f"new {words(300)}", tool="read", arguments='{"path":"src/f4.py"}')
    said += [*same, *numbered(1), user("next")]
    done = evicted(talk(*said), target=talk(*said).tokens - 100, scorer="priority")
    assert min(done.edits) in (2, 10)
    assert 10 in evicted(talk(*said), target=talk(*said).tokens - 500, scorer="priority").edits


@pytest.mark.requirement("A0.34")
def test_a_mark_in_a_tool_result_marks_nothing() -> None:
    said = [user("task"), *step(f"DO_NOT_EVICT IMPORTANT {words(300)}"), *numbered(4), user("next")]
    assert 2 in evicted(talk(*said), target=talk(*said).tokens - 250, scorer="fifo").edits


@pytest.mark.requirement("A0.34")
@pytest.mark.parametrize("scorer", ["priority", "hybrid"])
def test_important_in_a_tool_result_is_worth_nothing(scorer: str) -> None:
    said = [user("task"), *numbered(6), user("next")]
    loud = [user("task"), *step(f"IMPORTANT {words(300)}"), *numbered(6)[2:], user("next")]
    plain = [user("task"), *step(f"important {words(300)}"), *numbered(6)[2:], user("next")]
    done = [evicted(talk(*each), target=talk(*each).tokens - 400, scorer=scorer).edits for each in (said, loud, plain)]
    assert set(done[1]) == set(done[2])
    assert 2 in done[1]


@pytest.mark.requirement("A0.34")
def test_important_makes_a_users_message_worth_more_and_do_not_evict_protects_it() -> None:
    filler = [m for n in range(3) for m in (user(f"chatter {n} {words(200)}"), assistant("ok"))]
    early = [user(f"small talk {words(200)}"), assistant("ok")]
    loud, kept = user(f"IMPORTANT: see below. {words(200)}"), user(f"this stays {words(200)}", keep=True)
    said = [user("task"), *early, loud, assistant("ok"), kept, assistant("ok"), *filler, user("next")]
    transcript = talk(*said)
    done = evicted(transcript, target=transcript.tokens - 300, scorer="priority", types=("user",))
    assert set(done.edits) == {1, 7}
    everything = evicted(transcript, target=0, scorer="priority", types=("user",))
    assert 3 in everything.edits
    assert 5 not in everything.edits


@pytest.mark.requirement("A0.27", "A0.50", "A0.38", "A0.29", "A4.24")
@settings(max_examples=tried(50, 1_000), deadline=None)
@given(st.data())
def test_no_rule_about_what_may_go_is_ever_broken(data: st.DataObject) -> None:
    kinds = st.sampled_from(["system", "user", "assistant", "step", "memory", "rule"])
    said: list[Said] = []
    for n, kind in enumerate(data.draw(st.lists(kinds, min_size=1, max_size=12))):
        text = f"{n} {words(data.draw(st.sampled_from([5, 60])))}"
        if kind == "step":
            said += step(text, arguments=f'{{"n": {n}}}')
        elif kind == "rule":
            said.append(user("You must never deploy on a Friday."))
        elif kind == "memory":
            said.append(user(f"<memory>{text}"))
        else:
            said.append(Said(kind, text))
    policy = replace(PLAIN, memory=Memory(tags=("<memory>",)))
    transcript = replace(talk(*said), memory=frozenset(i for i, s in enumerate(said) if s.text.startswith("<memory>")))
    done = evicted(transcript, target=0, policy=policy, scorer=data.draw(st.sampled_from(SCORERS)), types=ALL)
    protection = protect(transcript)
    rules = {i for i, s in enumerate(said) if "never deploy" in s.text}
    decided = {i for i, s in enumerate(said) if s.role in ("system", "assistant")}
    assert set(done.edits).isdisjoint(protection.all | rules | decided)
    assert [p.index for p in done.pieces] == list(range(len(said)))


@pytest.mark.requirement("A0.36")
def test_memory_goes_only_after_its_time() -> None:
    said = [user("task"), user(f"<memory>likes tea {words(300)}"), *numbered(12), user("next")]
    transcript = replace(talk(*said), memory=frozenset({1}))
    some = evicted(transcript, target=transcript.tokens - 1_200, scorer="type_based")
    assert 1 not in some.edits
    blocks = {b.index: b.kind for b in candidates(some, _bounds(transcript))}
    assert blocks[1] is ContentType.MEMORY


def _bounds(transcript: Transcript):  # type: ignore[no-untyped-def]
    return bounds_for(transcript, settings=PLAIN, budget=window(100_000), known=ConversationState(), counter=CHARS4)


@pytest.mark.requirement("D13", "A0.39", "A0.52")
@pytest.mark.parametrize("mode", ["finding", "marker", "none"])
def test_what_stands_in_its_place_is_what_the_policy_asks_for(mode: str) -> None:
    said = [user("task"), *step('{"status": "shipped", "order": "A-17"}' + words(200), tool="get_order"), user("next")]
    policy = replace(PLAIN, placeholder=mode)  # type: ignore[arg-type]
    transcript = talk(*said, *numbered(1), user("and?"))
    text = evicted(transcript, target=0, policy=policy, scorer="fifo").edits[2].text
    if mode == "finding":
        assert "get_order" in text
        assert transcript.messages[2].ref in text
        assert CHARS4.count(text) <= 50
    else:
        assert text == {"marker": "[Old tool result content cleared]", "none": "-"}[mode]


@pytest.mark.requirement("A0.42")
def test_a_block_has_the_same_id_on_every_request() -> None:
    said = [user("task"), *numbered(3)]
    first = {b.id: b.index for b in candidates(untouched(talk(*said)), _bounds(talk(*said)))}
    later_said = [*said, *step("more", tool="look"), user("next")]
    later = {b.id: b.index for b in candidates(untouched(talk(*later_said)), _bounds(talk(*later_said)))}
    assert first.items() <= later.items()


@pytest.mark.requirement("A0.55", "A0.51")
def test_nothing_given_is_changed_and_what_was_freed_is_net_of_the_placeholders() -> None:
    transcript = talk(user("task"), *numbered(6), user("next"))
    before = untouched(transcript)
    done = evicted(transcript, target=transcript.tokens - 700, scorer="fifo")
    assert before == untouched(transcript)
    recounted = sum(p.tokens if p.text is None else 4 + CHARS4.count(p.text) for p in done.pieces)
    assert recounted + transcript.priming == done.tokens
    assert sum(e.tokens for e in done.edits.values()) > 0


def test_a_policy_may_spare_the_newest_steps() -> None:
    said = [user("task"), *numbered(10), user("next")]
    done = evicted(talk(*said), target=0, scorer="fifo", protect_steps=4)
    assert max(done.edits) == 12


def test_a_bucket_that_a_layer_is_about_is_the_only_one_it_touches() -> None:
    said = [user("task"), *numbered(6), user(f"chatter {words(300)}"), *numbered(1), user("next")]
    transcript = talk(*said)
    bounds = bounds_for(transcript, settings=PLAIN, budget=window(100_000), known=ConversationState(), counter=CHARS4)
    layer = Layer(strategy="evict", scope="tool_outputs", params={"scorer": "fifo", "types": ("tool_result", "user")})
    done = evict(untouched(bounds.transcript), replace(bounds, layer=layer, aim=0))
    assert all(transcript.messages[i].is_result for i in done.edits)


def test_the_call_of_a_result_stays_with_it() -> None:
    call = ToolCall("a", "read", "{}")
    said = [user("task"), assistant("", call), result(words(300), "a"), *numbered(2), user("next")]
    done = evicted(talk(*said), target=0, scorer="fifo")
    assert [p.index for p in done.pieces] == list(range(len(said)))
    assert system("x").role == "system"
