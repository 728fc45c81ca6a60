import random

import pytest

from policies.effects import Done, Failed, Reply, Summary
from policies.summary.check import judge, without_reasoning
from policies.summary.prompts import PROMPTS
from policies.tokens import CHARS4
from tests.policies.play import words

GOOD = (
    "Goal: move the shop to the new server\nDone: the database was copied and checked\n"
    "Decisions: keep port 5432 (because the firewall only lets that one through)\n"
    "Next step: switch the DNS record of shop.example.org"
)
MATERIAL = "\n".join(
    f"[result of look] Fact {n}: row {n * 7} has {n * n} items and weighs {n * 13} kg in hall {n % 7}."
    for n in range(60)
)


def verdict(
    reply: object, *, prompt: str = "structured", max_tokens: int = 300, material: str = MATERIAL
) -> tuple[str, str]:
    return judge(reply, material=material, prompt=PROMPTS[prompt], max_tokens=max_tokens, counter=CHARS4)


def points(count: int) -> str:
    rng = random.Random(count)
    said = (" ".join("".join(rng.choice("aeionrst") for _ in range(5)) for _ in range(6)) for _ in range(count))
    return "".join(f"Point {n} {words[:30]}. " for n, words in enumerate(said))


@pytest.mark.requirement("A0.57")
@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        f"<think>Let me see.\nWhat matters?</think>\n{GOOD}\n",
        f"and so I will write it down</think>\n{GOOD}",
        f"Here is the summary:\n\n{GOOD}",
        f"```text\n{GOOD}\n```",
        f"```markdown\n{GOOD}\n```\n",
        f"<reasoning><think>hm</think></reasoning>{GOOD}",
    ],
)
def test_good_notes_are_taken_without_what_stands_around_them(reply: str) -> None:
    assert verdict(Summary(reply)) == (GOOD, "")


@pytest.mark.requirement("P6", "R.52", "R.53")
@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Failed("timeout"), "timeout"),
        (Failed("status_500"), "status_500"),
        (Done(), "no_reply"),
        (None, "no_reply"),
        (Summary(GOOD, tool_calls=1), "tool_call"),
        (Summary("<think>hm, " + words(50)), "reasoning_only"),
        (Summary("<thinking>all of it</thinking>"), "reasoning_only"),
        (Summary(""), "empty"),
        (Summary(" \n\t "), "empty"),
        (
            Summary("Goal:\nDone:\nIn progress: none\nLeft to do: n/a\nOpen problems: -\nNext step: [none]\n" * 2),
            "empty",
        ),
        (Summary('{"goal": "", "done": [], "next_step": null}'), "empty"),
        (Summary("Done so far: it works now."), "too_short"),
        (
            Summary("I'm sorry, but I can't help with summarising this conversation, since it is private. " * 2),
            "refusal",
        ),
        (
            Summary("I cannot do that. I am a careful assistant and this is not something I may look into, ever."),
            "refusal",
        ),
        (Summary("\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u603b\u7ed3\u8fd9\u6bb5\u5bf9\u8bdd\uff0c" * 20), "refusal"),
        (
            Summary(
                "Es tut mir leid, aber ich kann dieses Gespr\u00e4ch leider nicht zusammenfassen, weil es privat ist und bleibt."
            ),
            "refusal",
        ),
        (Summary(MATERIAL[30:1_230]), "echo"),
        (Summary("The server was moved once again.\n" * 12), "loop"),
        (
            Summary(
                "Goal: the user wants the server moved to another rack of the same room.\n"
                "Done: the assistant asked for the name of the server and for its rack.\n" * 6
            ),
            "loop",
        ),
        (Summary(points(60), finish_reason="length"), "too_long"),
        (Summary("x" * 900_000), "too_long"),
        (
            Summary(
                '{"error": {"message": "Rate limit reached for requests", "type": "tokens", "code": 429, "param": null}}'
            ),
            "error_text",
        ),
        (
            Summary(
                "Error code: 429 - too many requests were made in the last minute, please wait and try it again later."
            ),
            "error_text",
        ),
        (
            Summary(
                "503 Service Unavailable: the server cannot handle the request right now, so please try again in a while."
            ),
            "error_text",
        ),
        (
            Summary(
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens, please reduce."
            ),
            "error_text",
        ),
        (Summary("[Summary goes here]\n" + words(40)), "error_text"),
        (Summary("Lorem ipsum\n" + words(40)), "error_text"),
        (Summary("\ufffd\ufffd\x00\x01 abc def ghi " * 20), "garbage"),
        (Summary("A" * 900), "garbage"),
    ],
)
def test_a_useless_answer_is_refused_with_its_reason(reply: Reply | None, code: str) -> None:
    assert verdict(reply) == ("", code)


@pytest.mark.requirement("A0.78", "R.53")
def test_ninety_percent_of_the_original_is_not_smaller() -> None:
    material = words(1_000, "material")
    text = points(100)
    for tokens, code in ((899, ""), (900, "not_smaller"), (1_000, "not_smaller")):
        assert verdict(Summary(text[: 4 * tokens]), max_tokens=2_000, material=material)[1] == code
    judged = judge(
        Summary(text[:2_000]), material=material, prompt=PROMPTS["plain"], max_tokens=900, counter=CHARS4, original=500
    )
    assert judged == ("", "not_smaller")


@pytest.mark.requirement("P6")
def test_twenty_tokens_are_enough_and_half_too_much_is_let_through() -> None:
    assert verdict(Summary(points(9)[: 4 * 19 - 1] + "."))[1] == "too_short"
    assert verdict(Summary(points(9)[: 4 * 20 - 1] + "."))[1] == ""
    assert verdict(Summary(points(100)[: 4 * 450]))[1] == ""
    assert verdict(Summary(points(100)[: 4 * 452]))[1] == "too_long"


@pytest.mark.requirement("A0.65", "A0.64")
@pytest.mark.parametrize(("prompt", "least"), [("level_3", 3), ("level_2", 6), ("tool_result", 8), ("plain", 20)])
def test_short_summaries_have_a_smaller_floor(prompt: str, least: int) -> None:
    assert verdict(Summary(words(least - 1, "abc")), prompt=prompt)[1] == "too_short"
    assert verdict(Summary(words(least, "abc")), prompt=prompt)[1] == ""


@pytest.mark.requirement("A0.61")
def test_no_notes_are_no_fault() -> None:
    assert verdict(Summary("none"), prompt="notes") == ("", "nothing")


def test_an_error_that_the_material_reports_may_be_its_summary() -> None:
    said = (
        "Error code: 429 was returned by the gateway for each of the four calls, with a wait of 30 seconds in between."
    )
    assert verdict(Summary(said), prompt="tool_result")[1] == "error_text"
    assert verdict(Summary(said), prompt="tool_result", material=f"ERROR CODE: 429\n{MATERIAL}")[1] == ""
    found = "The gateway returned error code 429 for each of the four calls, with a wait of 30 seconds in between them."
    assert verdict(Summary(found), prompt="tool_result")[1] == ""


def test_json_and_headings_end_as_the_same_text() -> None:
    json_reply = (
        '{"goal": "move the shop to the new server", "done": ["the database was copied and checked"], "decisions": '
        '[{"decision": "keep port 5432", "why": "the firewall only lets that one through", "rejected": []}], '
        '"next_step": "switch the DNS record of shop.example.org"}'
    )
    assert verdict(Summary(json_reply)) == verdict(Summary(GOOD)) == (GOOD, "")


def test_an_answer_that_was_cut_off_loses_its_broken_end() -> None:
    cut = f"The shop was moved to the new server and checked. {points(3)}It listens on port 54"
    assert (
        verdict(Summary(cut, finish_reason="length"), prompt="plain")[0]
        == cut.removesuffix("It listens on port 54").strip()
    )
    assert verdict(Summary(cut), prompt="plain")[0] == cut


def test_reasoning_is_left_out_however_it_is_nested() -> None:
    assert without_reasoning("a<think>b<think>c</think>d</think>e") == "ae"
    assert without_reasoning("a</think>b") == "b"
    assert without_reasoning("a<think>b") == "a"


@pytest.mark.requirement("S.27")
@pytest.mark.parametrize(
    "unit",
    [
        "<think>",
        "</think>",
        "Goal:\n",
        "# ",
        "None ",
        "i am sorry ",
        "```\n",
        "[",
        "a ",
        " \t",
        ". ",
        "Here is ",
        "-*_",
        '{"a":',
        "(",
    ],
)
@pytest.mark.timeout(30)  # a tenth of a second, where quadratic takes minutes
def test_hostile_repetition_is_judged_in_linear_time(unit: str) -> None:
    text = unit * (60_000 // len(unit))
    verdict(Summary(text), max_tokens=20_000)
