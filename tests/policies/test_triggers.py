"""When layers are due and where their work ends, and what growth does to that."""

from dataclasses import replace

import pytest

from policies.ledger import Action, LayerReport
from policies.limits import TokenBudget
from policies.settings import ContextSettings, Layer
from tests.policies.play import Said, assistant, decide, step, talk, user, words

PLAIN = ContextSettings(margin=0.0, headroom=0, reserve_floor=0, rot_soft_tokens=None, cold_at=None)
HUNDRED = TokenBudget(window=100_000, reserve=0, headroom=0)
EVICT = Layer(strategy="evict", at=0.75, stop_at=0.60, params={"scorer": "fifo"})


def at(tokens: int, *, results: int = 40) -> list[Said]:
    """A conversation of exactly so many tokens, most of them in old results, the newest message short."""
    task, end = user("task"), [assistant("done"), user("go on")]
    each = (tokens - 400) // results
    said: list[Said] = [task]
    for n in range(results):
        said += step(f"{n} {words(each - 20)}", arguments=f'{{"n": {n}}}')
    missing = tokens - talk(*said, *end, user("")).tokens
    return [*said, *end[:1], user(words(missing + 4 + talk(end[1]).tokens - talk().tokens - 4) if missing else "")]


def sized(tokens: int) -> list[Said]:
    said = at(tokens)
    for spare in range(-40, 41):
        tried = [*said[:-1], user(words(max(0, len(said[-1].text) // 4 + spare)))]
        if talk(*tried).tokens == tokens:
            return tried
    raise AssertionError(f"cannot make {tokens}")


def chat(tokens: int) -> list[Said]:
    """A conversation of about so many tokens without tools."""
    said = [user("task")]
    for n in range(tokens // 1_000):
        said += [assistant(f"{n} {words(490)}"), user(f"{n} {words(490)}")]
    return said


def kept(trail: tuple[LayerReport, ...]) -> list[str]:
    return [r.layer for r in trail if r.kept]


@pytest.mark.requirement("D2", "A0.10")
def test_a_layer_is_due_at_its_share_and_not_a_token_before() -> None:
    settings = replace(PLAIN, layers=(EVICT,))
    for tokens, action in ((74_999, Action.PASS), (75_000, Action.EDIT)):
        decision = decide(talk(*sized(tokens)), settings=settings, budget=HUNDRED)
        assert decision.before == tokens
        assert decision.action is action
    assert decision.after <= 60_000


@pytest.mark.requirement("A0.44", "A0.135")
def test_a_layer_that_cannot_reach_its_target_does_what_it_can() -> None:
    settings = replace(PLAIN, layers=(EVICT,))
    said = [*chat(70_000), *step(words(9_000)), assistant("done"), user("go on")]
    decision = decide(talk(*said), settings=settings, budget=HUNDRED)
    assert kept(decision.trail) == ["evict"]
    assert 69_000 < decision.after < 70_000


@pytest.mark.requirement("A0.142")
def test_a_later_layer_runs_where_an_earlier_one_fell_short() -> None:
    said = [*step(words(10_000)), *chat(80_000)]
    layers = (EVICT, Layer(strategy="compact", at=0.75))
    decision = decide(talk(user("task"), *said, user("go on")), settings=replace(PLAIN, layers=layers), budget=HUNDRED)
    assert kept(decision.trail) == ["evict", "compact"]
