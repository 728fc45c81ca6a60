"""A single tool result above its cap: what stays, where one reads on, and what is left out of a JSON document."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import ToolCall, Transcript
from policies.settings import Bucket, ContextSettings, Ingest, Layer
from policies.text.gist import without_fields
from policies.tokens import CHARS2_5, CHARS4, CharCounter, Method, cap_text
from tests.cases import case_of
from tests.policies.play import (
    assistant,
    decide,
    remember,
    result,
    step,
    strategy,
    system,
    talk,
    user,
    window,
    words,
)

ingest_cap = strategy("ingest_cap")

REF = "0123456789ab"
LONG = "".join(f"{n:05d} line of a log\n" for n in range(2_000))[:40_000]


def bounds(
    transcript: Transcript,
    ingest: Ingest = Ingest(),
    *,
    tokens: int = 200_000,
    known: ConversationState | None = None,
    layer: Layer | None = None,
    buckets: dict[str, Bucket] | None = None,
) -> Bounds:
    settings = ContextSettings(ingest=ingest, buckets=buckets or {})
    found = bounds_for(
        transcript, settings=settings, budget=window(tokens), known=known or ConversationState(), counter=CHARS4
    )
    return found if layer is None else replace(found, layer=layer)


def shown(transcript: Transcript, index: int, ingest: Ingest, *, tokens: int = 200_000) -> str | None:
    """What stands for a message after the cap, None where its own bytes do."""
    return ingest_cap(untouched(transcript), bounds(transcript, ingest, tokens=tokens)).pieces[index].text


def cut_of(text: str) -> tuple[str, dict[str, object], str]:
    """The shown beginning, the line of JSON where a text was cut, and the shown end."""
    head, line, tail = re.split(r"\n?(\{\"truncated\": .*\})\n?", text)
    return head, dict(json.loads(line)), tail


# -- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A3.12", "D11")
def test_of_40_000_characters_at_a_cap_of_2_500_tokens_two_equal_sides_stay() -> None:
    assert len(LONG) == 40_000
    transcript = talk(user("task"), *step(LONG), assistant("done"))
    text = shown(transcript, 2, Ingest(cap=2_500)) or ""
    assert len(text) <= 10_000
    head, line, tail = cut_of(text)
    assert LONG.startswith(head)
    assert LONG.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1
    assert len(head) >= 5_000 - 80
    assert line["ref"] == f"{transcript.messages[2].ref}.txt"


@pytest.mark.requirement("A4.18")
@pytest.mark.parametrize("method", ["middle_out", "head", "tail"])
def test_a_cut_text_has_a_line_that_says_where_its_beginning_ended_in_bytes(method: Method) -> None:
    original = "Zeile äöü 漢字 🙂\n" * 3_000
    text = cap_text(original, 1_000, counter=CHARS4, ref=REF, method=method)
    begun, line, ended = cut_of(text)
    assert line == {"truncated": True, "ref": f"{REF}.txt", "next_cursor": line["next_cursor"]}
    cursor = int(str(line["next_cursor"]))
    head = original.encode()[:cursor].decode()
    assert begun == head
    assert (method == "tail") == (cursor == 0)
    assert original.endswith(ended)
    assert (method == "head") == (ended == "")
    assert 950 <= CHARS4.count(text) <= 1_000


@pytest.mark.requirement("A3.20")
@pytest.mark.parametrize("method", ["middle_out", "head", "tail"])
def test_a_tiny_cap_never_makes_a_text_longer(method: Method) -> None:
    for cap in range(1, 101):
        with case_of(cap):
            text = cap_text(LONG, cap, counter=CHARS4, ref=REF, method=method)
            assert 0 < len(text) <= 4 * cap + 3
            if cap < 20:
                assert LONG.startswith(text)
            if cap > 60:
                assert cut_of(text)[1]["truncated"] is True


@given(
    text=st.text(alphabet=st.sampled_from('ab \nä漢🙂\ud800"'), max_size=600),
    cap=st.integers(1, 120),
    counter=st.sampled_from([CHARS4, CHARS2_5, CharCounter(1, 1)]),
    method=st.sampled_from(["middle_out", "head", "tail"]),
)
@pytest.mark.requirement("A3.20", "A3.12")
def test_any_text_comes_out_no_longer_and_under_its_cap(
    text: str, cap: int, counter: CharCounter, method: Method
) -> None:
    capped = cap_text(text, cap, counter=counter, ref=REF, method=method)
    assert len(capped) <= len(text)
    assert counter.count(capped) <= cap or len(capped) == 1
    assert capped == cap_text(text, cap, counter=counter, ref=REF, method=method)
    assert (capped == text) == (counter.count(text) <= cap) or len(text) == 1


@pytest.mark.requirement("A4.20")
def test_html_of_200_kb_and_broken_json_are_cut_and_never_an_error() -> None:
    html = "<html>" + "<div class='x'>\u00a0</div>" * 9_000 + "</html>"
    broken = '{"items": [' + '{"id": 1, "raw": "x\\"},' * 8_000
    deep = "[" * 100_000
    for text in (html, broken, deep):
        transcript = talk(user("task"), *step(text), assistant("done"))
        ingest = Ingest(cap=2_500, drop_fields={"*": ("raw",)})
        draft = ingest_cap(untouched(transcript), bounds(transcript, ingest))
        assert draft.pieces[2].tokens <= 2_500
        assert draft.pieces[2].kind is EditKind.INGEST_CAP
        assert draft.tokens < untouched(transcript).tokens


# -- caps ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D11", "A4.17")
def test_the_cap_is_25_000_tokens_and_never_above_the_cap_of_the_bucket() -> None:
    transcript = talk(user("task"), *step(words(30_000)), assistant("done"))
    ingest = Ingest(share=1.0)
    assert ingest_cap(untouched(transcript), bounds(transcript, ingest)).pieces[2].tokens in range(24_900, 25_001)
    voice = replace(window(32_000), caps={"tool_outputs": 8_000})
    settings = ContextSettings(ingest=ingest)
    small = bounds_for(transcript, settings=settings, budget=voice, known=ConversationState(), counter=CHARS4)
    assert ingest_cap(untouched(transcript), small).pieces[2].tokens in range(7_900, 8_001)


def test_a_result_exactly_at_the_cap_stays_and_one_token_more_is_cut() -> None:
    fits, over = talk(user("t"), *step(words(2_496))), talk(user("t"), *step(words(2_497)))
    assert (fits.messages[2].tokens, over.messages[2].tokens) == (2_500, 2_501)
    assert shown(fits, 2, Ingest(cap=2_500)) is None
    assert shown(over, 2, Ingest(cap=2_500)) is not None


@pytest.mark.requirement("A0.69")
def test_the_report_of_a_sub_agent_of_30_000_tokens_comes_to_2_000() -> None:
    transcript = talk(user("t"), *step(words(30_000), tool="Task"), *step(words(20_000), tool="read"))
    draft = ingest_cap(untouched(transcript), bounds(transcript, Ingest(sub_agent_tools=("Task",))))
    assert draft.pieces[2].tokens in range(1_950, 2_001)
    assert draft.pieces[4].text is None


def test_a_tool_has_a_cap_of_its_own_that_no_bucket_is_exceeded_by() -> None:
    transcript = talk(user("t"), *step(words(20_000), tool="grep"), *step(words(20_000), tool="read"))
    ingest = Ingest(cap=5_000, tools={"grep": 1_000, "read": 90_000})
    draft = ingest_cap(untouched(transcript), bounds(transcript, ingest))
    assert draft.pieces[2].tokens in range(950, 1_001)
    assert draft.pieces[4].text is None
    read = talk(user("t"), *step(words(20_000), tool="read"), *step("done"))
    limited = ingest_cap(untouched(read), bounds(read, ingest, tokens=50_000))
    assert limited.pieces[2].tokens in range(9_900, 10_001)  # its share of the window


# -- fields ----------------------------------------------------------------------------------------------------------

DOCUMENT = (
    '{"id": 7,  "raw_html": "<p>' + "x" * 900 + '</p>", "rows": [{"id": 1.50, "etag": "a"}, {"etag": "b", "n": 1e3}]}'
)


@pytest.mark.requirement("A4.19")
def test_fields_are_left_out_of_a_json_result_of_any_size_and_the_line_below_names_them() -> None:
    transcript = talk(user("t"), *step(DOCUMENT, tool="fetch"), assistant("done"))
    text = shown(transcript, 2, Ingest(drop_fields={"fetch": ("raw_html", "etag")})) or ""
    document, line = text.rsplit("\n", 1)
    assert document == '{"id": 7, "rows": [{"id": 1.50}, { "n": 1e3}]}'
    assert json.loads(line) == {"left_out": ["raw_html", "etag"], "ref": transcript.messages[2].ref}


@pytest.mark.requirement("A4.19")
def test_include_keeps_a_field_that_is_dropped_for_every_tool() -> None:
    transcript = talk(user("t"), *step(DOCUMENT, tool="fetch"), *step(DOCUMENT + " ", tool="other"))
    ingest = Ingest(drop_fields={"*": ("raw_html",)}, include={"fetch": ("raw_html",)})
    assert shown(transcript, 2, ingest) is None
    assert "raw_html" not in (shown(transcript, 4, ingest) or "raw_html").rsplit("\n", 1)[0]


def test_a_document_that_is_still_too_long_is_cut_and_read_on_from_its_start() -> None:
    rows = json.dumps([{"id": n, "raw": "x" * 50} for n in range(2_000)])
    transcript = talk(user("t"), *step(rows), assistant("done"))
    text = shown(transcript, 2, Ingest(cap=1_000, drop_fields={"*": ("raw",)})) or ""
    begun, line, ended = cut_of(text)
    assert "raw" not in begun + ended
    assert line["next_cursor"] == 0
    assert CHARS4.count(text) <= 996


def test_what_little_is_left_out_has_no_line_of_its_own() -> None:
    transcript = talk(user("t"), *step('{"id": 1, "etag": "0123456789"}'), assistant("done"))
    assert shown(transcript, 2, Ingest(drop_fields={"*": ("etag",)})) == '{"id": 1}'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", 'q"\\', "ü"]), inner, max_size=4)
        ),
        max_leaves=25,
    ).filter(lambda v: isinstance(v, dict | list)),
    st.sets(st.sampled_from(["a", "b", 'q"\\', "ü"])),
    st.sampled_from([None, 2]),
)
def test_leaving_out_fields_is_what_a_parser_says_it_is(value: object, names: set[str], indent: int | None) -> None:
    def pruned(node: object) -> object:
        if isinstance(node, dict):
            return {k: pruned(v) for k, v in node.items() if k not in names}
        return [pruned(v) for v in node] if isinstance(node, list) else node

    text, found = without_fields(json.dumps(value, indent=indent), names)
    assert json.loads(text) == pruned(value)
    assert set(found) <= names
    assert (text == json.dumps(value, indent=indent)) == (not found)


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D25")
def test_a_layer_that_is_always_due_changes_what_was_sent_only_in_a_batch() -> None:
    transcript = talk(user("t"), *step(words(2_000)), *step(words(2_001)), *step("now"))
    known, layer = ConversationState(length=3), Layer(strategy="ingest_cap", at=0.0)
    between = bounds(transcript, Ingest(cap=1_000), known=known, layer=layer)
    assert [p.index for p in ingest_cap(untouched(transcript), between).pieces if p.text] == [4]
    batch = replace(between, trigger=1_000)
    assert [p.index for p in ingest_cap(untouched(transcript), batch).pieces if p.text] == [2, 4]


@pytest.mark.requirement("A3.12")
def test_a_result_capped_from_the_first_request_on_is_the_same_on_every_later_one() -> None:
    settings = ContextSettings(ingest=Ingest(cap=1_000, from_start=True))
    transcript = talk(system("s"), user("t"), *step(words(3_000)))
    first = decide(transcript, budget=window(100_000), settings=settings)
    known = remember(ConversationState(), first, transcript)
    longer = talk(system("s"), user("t"), *step(words(3_000)), assistant("a"), user("b"))
    second = decide(longer, budget=window(100_000), settings=settings, known=known)
    assert first.pieces is not None
    assert second.pieces is not None
    assert second.pieces[: len(first.pieces)] == first.pieces
    assert not second.is_new


def test_a_pinned_step_and_a_second_run_change_nothing() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    pinned = talk(user("t"), assistant("", *calls), result(words(900), "a"), result("1", "b", keep=True), user("v"))
    ingest = Ingest(cap=500, drop_fields={"*": ("x",)})
    assert ingest_cap(untouched(pinned), bounds(pinned, ingest)).edits == {}
    transcript = talk(user("t"), *step(words(900)), assistant("done"))
    once = ingest_cap(untouched(transcript), bounds(transcript, ingest))
    assert ingest_cap(once, bounds(transcript, ingest)) is once
