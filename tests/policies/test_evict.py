"""What may be evicted, in which order, and what stands in its place."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import ConversationState, Draft, bounds_for, untouched
from policies.messages import Transcript, protect
from policies.settings import ContextSettings, Layer, Param
from policies.strategies.scorers import SCORERS, ContentType
from policies.tokens import CHARS4
from tests.policies.play import Said, step, strategy, talk, user, window, words
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


@pytest.mark.requirement("A0.4")
def test_a_result_that_a_later_call_of_the_same_tool_replaced_goes_before_all_others() -> None:
    said = [user("task"), *numbered(6)]
    same = step(f"new {words(300)}", tool="read", arguments='{"path":"src/f4.py"}')
    said += [*same, *numbered(1), user("next")]
    done = evicted(talk(*said), target=talk(*said).tokens - 100, scorer="priority")
    assert min(done.edits) in (2, 10)
    assert 10 in evicted(talk(*said), target=talk(*said).tokens - 500, scorer="priority").edits


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
    policy = replace(PLAIN, memory=("<memory>",))
    transcript = replace(talk(*said), memory=frozenset(i for i, s in enumerate(said) if s.text.startswith("<memory>")))
    done = evicted(transcript, target=0, policy=policy, scorer=data.draw(st.sampled_from([*SCORERS])), types=ALL)
    protection = protect(transcript)
    rules = {i for i, s in enumerate(said) if "never deploy" in s.text}
    decided = {i for i, s in enumerate(said) if s.role in ("system", "assistant")}
    assert set(done.edits).isdisjoint(protection.all | rules | decided)
    assert [p.index for p in done.pieces] == list(range(len(said)))
