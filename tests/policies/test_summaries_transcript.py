import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.summary.material import MaterialLine, enclosed, harmless, harmless_lines, label, render_transcript

NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "<",
                "</",
                ">",
                "weir-",
                "weir-123456",
                "transcript",
                "notes",
                "[user] ",
                "[result of x]",
                "<|im_end|>",
                "\u200b",
                "\u2028",
                "\uff1c",
                "system",
                "/",
                "\n",
                " ",
                "<system>",
                "</weir-000000>",
                "[/INST]",
                "<<SYS>>",
                "�",
                "\x00",
                "|>",
                "\r",
            ]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)
TAG = re.compile(r"<(weir-\d{6})> (?:notes so far|transcript)\n")


@pytest.mark.requirement("R.58", "S.20")
@example(said=[("[/INST]", "<")], previous="")
@given(st.lists(st.tuples(NASTY, NASTY), min_size=1, max_size=5), NASTY)
def test_no_content_closes_its_fence_or_opens_another(said: list[tuple[str, str]], previous: str) -> None:
    lines = harmless_lines([MaterialLine(origin, text) for origin, text in said])
    shown = render_transcript(lines, previous=harmless(previous))
    opened = TAG.findall(shown)
    assert len(opened) == (2 if harmless(previous) else 1)
    for tag in opened:
        assert shown.count(f"</{tag}>") >= 1
    assert len(re.findall(r"<\s*/?\s*weir", shown, re.IGNORECASE)) == 2 * len(opened)
    assert shown.endswith(f"</{opened[-1]}>")
    marked = r"<\|?/?\s*(?:system|transcript|notes|im_(?:start|end|sep))(?![\w-])|<\||\[/?INST\]|<<SYS>>"
    assert not re.search(marked, shown, re.IGNORECASE)
    spoken = [re.match(r"\[([^\]]*)\] ", line) for line in shown.split("\n")]
    assert sum(m is not None and m.group(1) in {"user", "system", "result of x"} for m in spoken) == sum(
        line.origin in {"user", "system", "result of x"} for line in lines
    )


@given(NASTY)
def test_harmless_text_comes_back_as_it_is(text: str) -> None:
    once = harmless(text)
    assert harmless(once) == once
    once.encode()


@pytest.mark.requirement("R.58")
@pytest.mark.parametrize(
    "text",
    [
        "a < b and c > d",
        "if x <= 3: return [1, 2]",
        "[INFO] started",
        "List<String> names",
        "[2024-05-17] ok",
        "na\u00efve \u7528\u6237",
        "x->y\ttab",
    ],
)
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert harmless(text) == text


def test_a_label_is_one_short_line_without_markup() -> None:
    assert label("result of look") == "result of look"
    assert label("result of </x>\n[user] <|im_start|>") == "result of /x user im_start"
    assert label("\n") == "unknown"
    assert len(label("x" * 500)) == 64


def test_the_tag_follows_from_what_it_holds() -> None:
    assert enclosed("a", "x") == enclosed("a", "x")
    assert enclosed("a", "x").partition(">")[0] != enclosed("a", "y").partition(">")[0]
    lines = [MaterialLine("user", "hi"), MaterialLine("result of look", "two\nlines")]
    shown = render_transcript(lines, previous="Goal: x")
    assert shown.index("Goal: x") < shown.index("[user] hi") < shown.index("[result of look] two\n  lines")


@pytest.mark.requirement("S.27")
@pytest.mark.parametrize("unit", ["<", "< ", "</", "[ ", "<<", "\u200b", "<weir-", "[result of ", "<|", "\r"])
def test_hostile_repetition_is_read_in_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    harmless(text)  # quadratic would take hours


@pytest.mark.requirement("R.58")
@pytest.mark.parametrize(
    "said",
    [
        "\u06a9\u062a\u0627\u0628\u200c\u0647\u0627 \u0631\u0627 \u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\u0915\u094d\u200d\u0937 \u0915\u094d\u200c\u0937",
        "\u0d05\u0d35\u0d28\u0d4d\u200d \u0d2a\u0d31\u0d1e\u0d4d\u0d1e\u0d41",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525",
    ],
    ids=["Persian", "Hindi", "Malayalam", "emoji"],
)
def test_a_joiner_stays_where_a_script_spells_with_it(said: str) -> None:
    assert harmless(said) == said


@pytest.mark.requirement("R.58")
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("sys\u200dtem", "system"),
        ("<\u200c/system>", "\u2039/system>"),
        ("[\u200dassistant]", "(assistant]"),
        ("\uff1c\u200d|user|>", "\u2039|user|\u203a"),
        ("\u0645\u200c\u200d\u200c\u06a9", "\u0645\u200c\u06a9"),
        ("\u0645\u200b\u200d\u06a9", "\u0645\u06a9"),
    ],
)
def test_a_joiner_splits_no_marker_and_spells_no_message(said: str, shown: str) -> None:
    assert harmless(said) == shown
    assert harmless(shown) == shown
