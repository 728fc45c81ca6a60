"""A single tool result above its cap: what stays, where one reads on, and what is left out of a JSON document."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, bounds_for, untouched
from policies.messages import Transcript
from policies.settings import Bucket, ContextSettings, Ingest, Layer
from policies.text.gist import without_fields
from policies.tokens import CHARS2_5, CHARS4, CharCounter, Method, cap_text
from tests.policies.play import (
    assistant,
    step,
    strategy,
    talk,
    user,
    window,
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
