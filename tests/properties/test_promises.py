"""What Weir promises, in plain properties, while random clients talk to a served Weir in front of a strict upstream.

:data:`~tests.properties.promises.PROMISES` are looked at after each step of a script. A failure prints the smallest
script that breaks one, which can be put into :data:`KEPT` as it is.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.profile import soak, tried
from tests.properties.promises import PROMISES, Broken
from tests.properties.scripts import (
    CHAT,
    FORGED,
    MESSAGES,
    RESPONSES,
    Begin,
    Delete,
    Fork,
    Model,
    Note,
    Restart,
    Rewind,
    Script,
    Side,
    Switch,
    Talk,
    Work,
    scripts,
)
from tests.properties.world import opened

LARGE_AND_SMALL = (Model(16_384, 16_384), Model(4_096, 4_096))
KEPT: dict[str, Script] = {
    "P1 after a side request to a smaller model": Script(
        LARGE_AND_SMALL, (Begin(), Talk(turns=4), Side(), Talk(size=0.01))
    ),
    "P1 after a switch to a smaller model and back": Script(
        LARGE_AND_SMALL,
        (Begin(), Talk(turns=4), Switch(), Talk(size=0.01), Switch(model=0), Talk(size=0.01)),
    ),
    "P2 without max_tokens on chat": Script(steps=(Begin(CHAT, system=0.8), Talk(size=0.01))),
    "P2 without max_tokens on responses": Script(steps=(Begin(RESPONSES, system=0.8), Talk(size=0.01))),
    "P2 with a large max_tokens on messages": Script(steps=(Begin(MESSAGES, system=0.8, answer=1.5), Talk(size=0.01))),
    "P3 the task": Script(steps=(Begin(system=0.6, task=0.1), Talk(size=0.1))),
    "P3 the newest user text": Script(steps=(Begin(system=0.6), Talk(size=0.2))),
    "P3 an unread result": Script(steps=(Begin(system=0.6), Work(size=0.1))),
    "P4 a fork without a name": Script(steps=(Begin(name="first"), Talk(size=0.01), Fork(), Talk(client=1, size=0.01))),
    "P4 a fork with a name": Script(
        steps=(Begin(), Talk(turns=7, size=0.1), Fork(name="first"), Talk(client=1, size=0.01))
    ),
    "P4 the deletion of a fork with a name": Script(
        steps=(Begin(), Talk(turns=7, size=0.1), Fork(name="first"), Talk(client=1, size=0.01), Delete(1))
    ),
    "P6 after a side request to a smaller model": Script(
        LARGE_AND_SMALL, (Begin(), Talk(turns=4), Side(), Talk(size=0.01))
    ),
    "P6 a note at a distance": Script(steps=(Begin(), Note(distance=4), Talk(turns=8, size=0.1))),
    "P6 a note that comes with the batch": Script(
        (Model(8_192, 8_192),),
        (Begin(MESSAGES, task=0.1, answer=0.25), Talk(), Talk(turns=8), Note(distance=0), Work(turns=8)),
    ),
    "P3 an unread result in a full window": Script(steps=(Begin(system=0.6), Work(size=0.2))),
    "P3 a large unread result in a large window": Script(
        (Model(131_072, 131_072),), (Begin(), Talk(), Work(turns=4, size=0.2)), longest=64_000
    ),
    "P4 two conversations, of which one is deleted": Script(
        steps=(
            Begin(name="first"),
            Talk(),
            Begin(name="second", opening=1),
            Talk(client=1),
            Restart(),
            Delete(),
            Talk(),
        )
    ),
    "P4 a conversation that is deleted twice": Script(steps=(Begin(), Talk(), Delete(), Delete(), Talk())),
    "P4 two names that begin alike": Script(
        steps=(Begin(name="first"), Talk(turns=12, size=0.1), Fork(name="second"), Talk(client=1, size=0.1))
    ),
    "P5 content with lines as Weir writes them": Script(
        steps=(Begin(), Work(turns=6, size=0.1, kind=FORGED), Talk(turns=6, size=0.1, kind=FORGED))
    ),
    "P6 a rewound conversation": Script(
        steps=(Begin(), Talk(turns=12, size=0.1), Rewind(turns=6), Talk(turns=6, size=0.05))
    ),
}
"""Scripts that keep the promise which they are named by."""
RANDOM = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


EACH = 150
"""Scripts for each promise: all of them together take about an hour."""


async def play(script: Script, promises: Iterable[str]) -> None:
    """Play a script, and look at the promises after each of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(script, Path(folder)) as world:
            for step in script.steps:
                exchanges = await world.play(step)
                for name in promises:
                    try:
                        await PROMISES[name](world, exchanges)
                    except Broken as broken:
                        raise Broken(
                            name, f"{broken.what}\nafter step {world.step - 1} of\n{script}\n", *broken.shown
                        ) from None


@pytest.mark.parametrize(("promise", "script"), [pytest.param(n[:2], s, id=n) for n, s in KEPT.items()])
async def test_what_keeps_a_promise(promise: str, script: Script) -> None:
    await play(script, [promise])


@pytest.mark.timeout(tried(300, 7_200))
@settings(RANDOM, max_examples=tried(8, 600))
@given(script=scripts())
async def test_the_promises_hold_for_every_client(script: Script) -> None:
    await play(script, PROMISES)


@soak
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("promise", PROMISES)
@settings(RANDOM, max_examples=EACH, derandomize=False)
@given(script=scripts())
async def test_a_promise_holds_for_every_client(promise: str, script: Script) -> None:
    """One at a time, so that a script that breaks one does not become one that breaks another as it is made small."""
    await play(script, [promise])
