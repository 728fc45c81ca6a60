import random

import pytest

from policies.effects import Done, Failed, Reply, Summary
from policies.summary.check import judge
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


@pytest.mark.requirement("P6", "R.52", "R.53")
@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Failed("timeout"), "timeout"),
        (Failed("status_500"), "status_500"),
        (Done(), "no_reply"),
        (None, "no_reply"),
        (Summary(GOOD, tool_calls=1), "tool_call"),
        (Summary("<think>hm, " + words(50)), "empty"),
        (Summary("<thinking>all of it</thinking>"), "empty"),
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
        (
            Summary("Error code: 429 - too many requests were made in the last minute, please wait."),
            "refusal",
        ),
        (Summary("503 Service Unavailable: the server cannot handle the request right now, so try again."), "refusal"),
        (Summary("\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u603b\u7ed3\u8fd9\u6bb5\u5bf9\u8bdd\uff0c" * 20), "refusal"),
        (
            Summary(
                "Es tut mir leid, aber ich kann dieses Gespr\u00e4ch leider nicht zusammenfassen, weil es privat ist und bleibt."
            ),
            "refusal",
        ),
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
        (Summary("\ufffd\ufffd\x00\x01 abc def ghi " * 20), "garbage"),
        (Summary("A" * 900), "garbage"),
    ],
)
def test_a_useless_answer_is_refused_with_its_reason(reply: Reply | None, code: str) -> None:
    assert verdict(reply) == ("", code)
