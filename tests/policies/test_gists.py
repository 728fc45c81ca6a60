"""What stands where a message's content was: in few tokens, in its own words, with its errors."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.text.gist import gist, placeholder
from policies.tokens import CHARS4
from tests.profile import tried

ORDERS = json.dumps([{"order_id": f"W-{n}", "status": "delivered", "sku": "KX-4471"} for n in range(88_231, 88_270)])


@settings(max_examples=tried(25, 150), deadline=None)
@given(
    text=st.text(max_size=400),
    tokens=st.integers(0, 60),
    whole=st.booleans(),
    role=st.sampled_from(["tool", "assistant", "user"]),
)
def test_no_gist_takes_more_than_it_may(text: str, tokens: int, whole: bool, role: str) -> None:
    assert CHARS4.count(gist(text, role=role, max_tokens=tokens, counter=CHARS4, whole=whole)) <= tokens


@pytest.mark.requirement("A0.39", "D13")
@pytest.mark.parametrize("limit", [30, 40, 50])
def test_a_placeholder_names_tool_argument_and_ref_within_its_tokens(limit: int) -> None:
    line = placeholder(
        ORDERS,
        tool="get_order",
        arguments='{"order_id": "W-88231"}',
        ref="3fa9c1d27b60",
        max_tokens=limit,
        counter=CHARS4,
    )
    assert CHARS4.count(line) <= limit
    assert "get_order(W-88231)" in line
    assert "3fa9c1d27b60" in line
    assert line.count("]") == 1


_PRINTABLE = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=120)


@settings(max_examples=tried(25, 100), deadline=None)
@given(text=_PRINTABLE, tool=_PRINTABLE, arguments=_PRINTABLE, limit=st.integers(1, 60))
def test_a_placeholder_is_one_line_within_its_tokens(text: str, tool: str, arguments: str, limit: int) -> None:
    line = placeholder(text, tool=tool, arguments=arguments, ref="3fa9c1d27b60", max_tokens=limit, counter=CHARS4)
    assert CHARS4.count(line) <= limit
    assert len(line.splitlines()) <= 1
