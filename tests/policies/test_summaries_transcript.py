import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.summary.material import MaterialLine, harmless, harmless_lines, render_transcript

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
