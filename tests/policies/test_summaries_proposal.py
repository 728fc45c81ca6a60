from hypothesis import given
from hypothesis import strategies as st

from policies.summary.check import under_headings


@given(st.text(max_size=400))
def test_anything_is_read_without_an_error_and_once_is_enough(text: str) -> None:
    for given_text in (text, f"Goal: {text}", f'{{"goal": "{text}', f"Done:\n- {text}"):
        once = under_headings(given_text)
        if once:
            assert under_headings(under_headings(once)) == under_headings(once)
