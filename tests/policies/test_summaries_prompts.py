import re

import pytest

from policies.summary.prompts import PROMPTS
from policies.tokens import CHARS4

STRUCTURED = PROMPTS["structured"]


def strict(schema: object) -> bool:
    """Whether every object in a schema asks for every property and takes no other."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            named = set(schema["properties"])
            if set(schema["required"]) != named or schema["additionalProperties"] is not False:
                return False
        return all(strict(v) for v in schema.values())
    return not isinstance(schema, list) or all(strict(v) for v in schema)


@pytest.mark.requirement("A0.58")
@pytest.mark.parametrize(
    "category",
    [
        "every decision, why it was made, and the alternatives that were rejected",
        "errors that are not solved, with their exact text",
        "what is done, what is under way, what is left",
        "constraints of the user, word for word where they are short",
        "file paths, names of functions and classes, data structures",
        "all numbers that matter",
        "long output of tools, once its finding is told in one or two lines",
        "confirmations",
        "dead ends",
        "boilerplate around errors: keep the type and the detail",
        "reasoning that a later step replaced",
        "headings, bullets under them",
        "enough, alone, to go on with its work",
    ],
)
def test_the_structured_prompt_names_every_category(category: str) -> None:
    assert category in " ".join(STRUCTURED.instruction.split())


@pytest.mark.requirement("A0.58")
def test_what_is_to_be_kept_stands_before_what_is_to_be_dropped() -> None:
    keep, _, drop = STRUCTURED.instruction.partition("DROP")
    assert "PRESERVE" in keep
    assert "exact text" in keep
    assert "dead ends" in drop


@pytest.mark.requirement("A3.10")
@pytest.mark.parametrize("part", ["instruction", "merge"])
@pytest.mark.parametrize(
    "category",
    [
        "progress and decisions",
        "context, constraints and preferences",
        "next steps",
        "critical data",
        "files modified",
        "how",
        "errors",
        "resolved",
        "concise bullets",
    ],
)
def test_the_handoff_prompt_names_every_category(category: str, part: str) -> None:
    assert category in " ".join(getattr(PROMPTS["handoff"], part).lower().split())


@pytest.mark.requirement("A0.61")
@pytest.mark.parametrize("asked", ["what", "where", "conditions", "suspected cause", "path", "stands alone"])
def test_the_prompt_for_notes_asks_for_notes_that_stand_alone(asked: str) -> None:
    assert asked in PROMPTS["notes"].instruction


@pytest.mark.requirement("A0.64", "A0.65", "A0.67", "A1.10", "D20")
def test_every_prompt_is_registered_under_its_name_with_a_version_and_a_digest() -> None:
    names = {"structured", "handoff", "plain", "tool_result", "level_1", "level_2", "level_3", "reading", "notes"}
    assert set(PROMPTS) == names
    assert STRUCTURED.purpose == "structured-2"
    assert all(re.fullmatch(r"[0-9a-f]{8}", p.digest) for p in PROMPTS.values())
    assert len({p.digest for p in PROMPTS.values()}) == len(names)
    assert {p.name: p.purpose for p in PROMPTS.values()} == {p.name: f"{p.name}-{p.version}" for p in PROMPTS.values()}


@pytest.mark.requirement("D20")
def test_a_schema_asks_for_every_property_and_takes_no_other() -> None:
    assert strict(dict(STRUCTURED.schema))
    assert not strict({"type": "object", "properties": {"a": {}}, "required": [], "additionalProperties": False})
    assert [p.name for p in PROMPTS.values() if p.schema] == ["structured"]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_says_how_many_words_and_keeps_braces_of_the_task(prompt: object) -> None:
    ask = PROMPTS[prompt.name].ask  # type: ignore[attr-defined]
    for merge in (False, True):
        text = ask(max_tokens=100, merge=merge, task='read {"words": 3} and {reason}')
        assert "{words}" not in text.replace('{"words"', "")
        assert "at most 70 words" in text
    again = PROMPTS["structured"].ask_again("invented", max_tokens=100)
    assert "named things that do not occur" in again
    assert "70 words" in again
    assert "{" not in again


@pytest.mark.requirement("A0.57")
def test_headings_are_the_last_thing_that_is_read() -> None:
    for merge in (False, True):
        asked = STRUCTURED.ask(max_tokens=300, merge=merge).splitlines()
        assert [line for line in asked[-9:] if line.endswith(":")] == asked[-9:]
    assert max(CHARS4.count(p.instruction) for p in PROMPTS.values()) < 600
