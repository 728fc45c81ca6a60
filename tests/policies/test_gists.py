"""What code says of one message in fewer tokens: its errors, its findings, in its own words."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.extraction.gists import answer_gist, error_lines, result_gist, user_gist
from policies.tokens import CHARS4

LOG = "\n".join(f"step {n} took {n} ms" for n in range(300))


@pytest.mark.requirement("A0.64")
def test_every_line_that_reports_an_error_is_found_once_and_source_text_is_not() -> None:
    text = f'{LOG}\nValueError: port 5432\nok\nValueError: port 5432\nraise ValueError("no");\nfatal: x'
    assert error_lines(text) == ("ValueError: port 5432", "fatal: x")
    assert error_lines(json.dumps({"rows": 3, "error": "no such user", "status": "failed"})) == (
        "error no such user",
        "status failed",
    )
    (line,) = error_lines("x" * 5_000 + " ValueError: port 5432 " + "y " * 3_000)
    assert "ValueError: port 5432" in line
    assert len(line) <= 240


@pytest.mark.requirement("A0.64")
def test_with_all_errors_or_not_at_all() -> None:
    text = f"{LOG}\nValueError: port 5432\n{LOG}\n2 failed"
    gist = result_gist(text, max_tokens=40, counter=CHARS4, whole=True)
    assert "ValueError: port 5432" in gist
    many = "\n".join(f"ValueError: row_{n} is bad" for n in range(50))
    assert result_gist(many, max_tokens=100, counter=CHARS4, whole=True) == ""
    assert "ValueError: row_0 is bad" in result_gist(many, max_tokens=100, counter=CHARS4)


def test_the_numbers_of_a_listings_lines_do_not_pass_its_source_off_as_errors() -> None:
    source = "\n".join(f'        raise ValueError("row {n}");' for n in range(40))
    listing = "\n".join(f"{n}: {line}" for n, line in enumerate(source.splitlines(), 40))
    assert error_lines(source) == ()
    assert result_gist(listing, max_tokens=30, counter=CHARS4, whole=True)


@pytest.mark.requirement("A0.65")
def test_an_answer_is_told_by_its_conclusions_and_not_by_its_politeness() -> None:
    answer = "Certainly! I looked at it. The root cause is that cache_size was 512 MB. Let me know if I can help."
    assert answer_gist(answer, max_tokens=14, counter=CHARS4) == "The root cause is that cache_size was 512 MB."
    assert answer_gist(answer, max_tokens=6, counter=CHARS4).startswith("The root cause")


def test_a_users_sentences_stay_word_for_word() -> None:
    said = "Hello there, how are you doing today? My booking is ABC123 for 4 people. Thanks a lot for your help so far!"
    assert user_gist(said, max_tokens=12, counter=CHARS4) == "My booking is ABC123 for 4 people."


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=400), tokens=st.integers(1, 60), whole=st.booleans())
def test_no_gist_takes_more_than_it_may(text: str, tokens: int, whole: bool) -> None:
    assert CHARS4.count(result_gist(text, max_tokens=tokens, counter=CHARS4, whole=whole)) <= tokens
    assert CHARS4.count(answer_gist(text, max_tokens=tokens, counter=CHARS4)) <= tokens
    assert CHARS4.count(user_gist(text, max_tokens=tokens, counter=CHARS4)) <= tokens
