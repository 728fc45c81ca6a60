"""What stands where a message's content was: in few tokens, in its own words, with its errors."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.text.gist import gist, key_argument, placeholder
from policies.text.segments import error_lines
from policies.tokens import CHARS4, clip, shorten
from tests.profile import tried

LOG = "\n".join(f"step {n} took {n} ms" for n in range(300))
ORDERS = json.dumps([{"order_id": f"W-{n}", "status": "delivered", "sku": "KX-4471"} for n in range(88_231, 88_270)])


@pytest.mark.requirement("A0.64")
def test_every_line_that_reports_an_error_is_found_once_and_source_text_is_not() -> None:
    text = f'{LOG}\nValueError: port 5432\nok\nValueError: port 5432\nraise ValueError("no");\nfatal: x'
    assert error_lines(text) == ("ValueError: port 5432", "fatal: x")
    (line,) = error_lines("x" * 5_000 + " ValueError: port 5432 " + "y " * 3_000)
    assert "ValueError: port 5432" in line
    assert len(line) <= 240


@pytest.mark.requirement("A0.64")
def test_with_all_errors_or_not_at_all() -> None:
    text = f"{LOG}\nValueError: port 5432\n{LOG}\n2 failed"
    shown = gist(text, max_tokens=40, counter=CHARS4, whole=True)
    assert "ValueError: port 5432" in shown
    assert "2 failed" in shown
    many = "\n".join(f"ValueError: row_{n} is bad" for n in range(50))
    assert gist(many, max_tokens=100, counter=CHARS4, whole=True) == ""
    assert "ValueError: row_0 is bad" in gist(many, max_tokens=100, counter=CHARS4)


def test_the_numbers_of_a_listings_lines_do_not_pass_its_source_off_as_errors() -> None:
    source = "\n".join(f'        raise ValueError("row {n}");' for n in range(40))
    listing = "\n".join(f"{n}: {line}" for n, line in enumerate(source.splitlines(), 40))
    assert error_lines(source) == ()
    assert gist(listing, max_tokens=30, counter=CHARS4, whole=True)


@pytest.mark.requirement("A0.65")
def test_an_answer_is_told_by_what_is_rare_in_it_and_not_by_its_politeness() -> None:
    answer = "Certainly! I looked at it. The root cause is that cache_size was 512 MB. Let me know if I can help."
    shown = gist(answer, role="assistant", max_tokens=14, counter=CHARS4)
    assert shown == "The root cause is that cache_size was 512 MB."


def test_a_users_sentences_stay_word_for_word() -> None:
    said = "Hello there, how are you doing today? My booking is ABC123 for 4 people. Thanks a lot for your help so far!"
    assert gist(said, role="user", max_tokens=12, counter=CHARS4) == "My booking is ABC123 for 4 people."


def test_what_is_known_is_not_told_again() -> None:
    text = "Order W-88231 was found.\nThe parcel left from hall-7."
    assert gist(text, known="get_order W-88231", max_tokens=8, counter=CHARS4) == "The parcel left from hall-7."


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


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("collected\n" + "ok line of the runner\n" * 40 + "Tests  18 passed (18)", "18 passed"),
        ("export const a = 1;\nexport function parseOrder(x) {\n  return x;\n}\n", "parseOrder"),
        ("collected 40 items\n" + "ok\n" * 30 + "ValueError: unknown unit 'furlong'\n" + "ok\n" * 30, "ValueError"),
        (ORDERS, "W-88231"),
    ],
)
def test_a_placeholder_tells_the_verdict_of_a_run_the_error_and_what_was_found(result: str, found: str) -> None:
    text = placeholder(result, tool="run", arguments="{}", ref="0" * 12, counter=CHARS4)
    assert found in text
    assert CHARS4.count(text) <= 50


def test_the_argument_that_names_a_call_keeps_the_end_of_a_long_path() -> None:
    path = "/home/somebody/projects/with/a/very/long/path/that/goes/on/src/module/loader.py"
    named = key_argument(json.dumps({"path": path}))
    assert len(named) <= 60
    assert named.endswith("/src/module/loader.py")
    assert named.removeprefix("…") in path


@pytest.mark.parametrize("limit", range(1, 40))
def test_nothing_is_cut_within_a_word(limit: int) -> None:
    text = "read /srv/app/config/prod.yaml and found 18,250.75 for order W-88231 of mia_li_4471"
    for cut in (clip(text, max_tokens=limit, counter=CHARS4), shorten(text, limit * 2 + 8)):
        assert all(word in {*text.split(), ""} or "…" in word for word in cut.removesuffix("…").split())


@pytest.mark.parametrize(
    "line",
    [
        "throw error;",
        "return Promise.reject(error);",
        "} catch (error) {",
        "raise InvalidState(code)",
        "except TimeoutError:",
        "if (error.response?.status === 404) return markGone(id);",
        "// the error is handled by the caller",
        '+    raise ValueError(f"invalid {name}")',
        "from errors import NotFoundError",
    ],
)
def test_a_line_of_source_text_is_no_error(line: str) -> None:
    shown = f"start of the file\n{line}\nand some more of it that says nothing in particular"
    assert error_lines(shown) == ()


@pytest.mark.parametrize(
    "line",
    [
        "TypeError: Cannot read properties of undefined (reading 'items')",
        "error: failed to push some refs to 'origin'",
        "error[E0308]: mismatched types (expected u8)",
        "E   ValueError: invalid literal for int()",
        "FAILED tests/test_port.py::test_default - assert port(",
        '{"level": "error", "message": "connection refused"}',
        "* 3 steps failed to run",
        "import failed, no such file",
        "permission denied (publickey)",
        "status = failed",
        "from server: permission denied (publickey)",
    ],
)
def test_what_a_program_reports_is_an_error_even_where_it_quotes_code(line: str) -> None:
    assert error_lines(f"running\n{line}\nend") == (" ".join(line.split()),)
