"""How many requests until the window overflows: what was brought back is no growth, on whichever request it stands."""

import pytest

from policies.draft import ConversationState
from policies.ledger import EditKind
from policies.limits import limits_for
from proxy.monitor import _requests_left
from tests.policies.play import assistant, decide, remember, talk, user, window
from tests.policies.test_recalling import SETTINGS, brought, long_talk
from tests.policies.tongues import TONGUES


@pytest.mark.requirement("A4.25", "A0.139")
def test_what_an_earlier_request_was_brought_back_is_no_growth_either() -> None:
    language = next(iter(TONGUES))
    said = [*long_talk(language), user(TONGUES[language].facts[0][1])]
    budget, first = window(2_000), talk(*said)
    decision = decide(first, budget=budget, settings=SETTINGS)
    known, second = remember(ConversationState(), decision, first), talk(*said, assistant("yes"), user("thanks"))
    later = decide(second, budget=budget, settings=SETTINGS, known=known)
    assert brought(later)
    assert not [report for report in later.trail if report.layer == EditKind.RECALL]
    limits = limits_for(SETTINGS, budget)
    assert later.reading is not None
    grown = later._replace(
        raw_after=limits.trigger + 20, reading=later.reading._replace(velocity_tokens_per_turn=100.0)
    )
    assert _requests_left(grown, SETTINGS, limits=limits, used=grown.raw_after) is None
    assert _requests_left(grown._replace(pieces=None), SETTINGS, limits=limits, used=grown.raw_after) is not None
