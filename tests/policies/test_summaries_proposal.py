import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger import TaskDecision
from policies.summary.check import Proposal, under_headings
from policies.summary.prompts import HEADINGS, PROMPTS

FULL = Proposal(
    goal=("Move the shop to the new server",),
    done=("database copied", "rows checked"),
    current=("testing the login",),
    remaining=("switch the DNS record", "tell the team"),
    decisions=(
        TaskDecision("keep port 5432", "the firewall lets only that through", ("5433", "a tunnel")),
        TaskDecision("use WAL"),
    ),
    open_issues=("ValueError: bad port 99999",),
    environment=("cwd /srv/shop", "branch main"),
    learnings=("restart takes 40 s",),
    next_step=("switch the DNS record of shop.example.org",),
)
TEXT = """\
Goal: Move the shop to the new server
Done:
- database copied
- rows checked
In progress: testing the login
Left to do:
- switch the DNS record
- tell the team
Decisions:
- keep port 5432 (because the firewall lets only that through) [not: 5433; a tunnel]
- use WAL
Open problems: ValueError: bad port 99999
Environment:
- cwd /srv/shop
- branch main
Learnings: restart takes 40 s
Next step: switch the DNS record of shop.example.org"""
RAW = {
    **{field: list(getattr(FULL, field)) for field in HEADINGS},
    "decisions": [{"decision": d.text, "why": d.rationale, "rejected": list(d.alternatives)} for d in FULL.decisions],
}


@pytest.mark.requirement("A0.58")
def test_text_and_json_are_the_same_proposal() -> None:
    assert FULL.to_text() == TEXT
    assert under_headings(TEXT) == under_headings(json.dumps(RAW)) == TEXT
    assert set(PROMPTS["structured"].schema["properties"]) == set(RAW)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "reply",
    [
        f"```json\n{json.dumps(RAW, indent=2)}\n```",
        f"Here are the notes:\n\n{json.dumps(RAW)}\n\nLet me know!",
        json.dumps(RAW, indent=1).replace('",\n', '", // said so\n').replace("]", ",]"),
        json.dumps(RAW).replace("}", ",}").replace('"done"', '/* so far */ "done"'),
    ],
    ids=["code fence", "prose around", "comments and commas", "block comment"],
)
def test_broken_json_is_mended(reply: str) -> None:
    assert under_headings(reply) == TEXT


@pytest.mark.parametrize(
    "text",
    [
        "## Goal\nMove it\n\n## Done so far\n1. copied\n2. checked\n\n## Next steps\n- go on",
        "**Goal:** Move it\n**Done:**\n* copied\n* checked\n**To do:** go on",
        "- Goal: Move it\n- Done: copied\n- checked\n- Remaining: go on",
        "Goal: Move it\nCompleted:\n  - copied\n  - checked\nPending:\n  - go on",
        '{"task": "Move it", "completed": ["copied", "checked"], "todo": "go on", "unknown": 3}',
    ],
)
def test_headings_are_known_however_they_are_written(text: str) -> None:
    assert under_headings(text) == "Goal: Move it\nDone:\n- copied\n- checked\nLeft to do: go on"


@pytest.mark.parametrize(
    "text", ["", "Just prose about a shop.", "{}", "[1, 2]", '{"a": 1}', "{" * 5_000, '{"goal"', "null"]
)
def test_what_has_no_heading_is_no_proposal(text: str) -> None:
    assert under_headings(text) == text


def test_words_for_nothing_and_repetition_are_left_out() -> None:
    said = '{"goal": "none", "done": ["N/A", "copied", "copied"], "open_issues": "None.", "decisions": "nothing"}'
    assert under_headings(said) == "Done: copied"


def test_a_bullet_is_no_heading_where_headings_have_no_bullets() -> None:
    text = "Goal: x\nDone:\n- Errors: 3 in the log\n- Environment: set up"
    assert under_headings(text) == text


def test_decisions_are_read_from_objects_and_from_words() -> None:
    found = under_headings(
        '{"decisions": ["use WAL", {"text": "keep 5432", "rationale": "firewall", "alternatives": "5433"}]}'
    )
    assert found == "Decisions:\n- use WAL\n- keep 5432 (because firewall) [not: 5433]"


@given(st.text(max_size=400))
def test_anything_is_read_without_an_error_and_once_is_enough(text: str) -> None:
    for given_text in (text, f"Goal: {text}", f'{{"goal": "{text}', f"Done:\n- {text}"):
        once = under_headings(given_text)
        if once:
            assert under_headings(under_headings(once)) == under_headings(once)
