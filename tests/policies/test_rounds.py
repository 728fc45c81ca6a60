"""Ten summaries of one conversation, one after another, by a summariser that loses, invents and brings back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policies.draft import ConversationState
from policies.effects import Answers, Done, Effect, Failed, Offload, Reply, Summarize, Summary, Together
from policies.ledger import Decision
from policies.memory.checkpoint import Checkpoint
from policies.planner import plan
from policies.settings import BALANCED_SHAPES, ContextSettings, Layer, Summaries
from policies.text.segments import Readings, literals, sentences
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, remember, step, talk, user, window, words

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parent / "data" / "canary_sessions.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "data"
ROUNDS = 10
GHOST = "ghost-99173"
READINGS = Readings()
SETTINGS = ContextSettings(
    margin=0.0,
    shapes=(BALANCED_SHAPES[1],),
    layers=(Layer(strategy="compact"),),
    summarizer="small",
    summaries=Summaries(by_schema=False, prepare_at=None),
)


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded conversation with the values that have to survive, and those that were replaced."""

    name: str
    messages: list[Said]
    facts: list[dict[str, Any]]


def sessions(path: Path) -> Iterator[Session]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said = [Said(m["role"], m["content"]) for m in row["messages"]]
        yield Session(row["meta"]["id"], said, row["meta"]["facts"])


def recorded() -> list[Session]:
    found = list(sessions(SHIPPED))[:1]
    for name in ("side_constraints", "canary_sessions"):
        if (SHARED / f"{name}.jsonl").is_file():
            found += list(sessions(SHARED / f"{name}.jsonl"))[:2]
    return found


def hostile(effect: Effect, stale: list[str]) -> Reply:
    """Notes that lose everything, invent a name, and bring back what was replaced."""
    if isinstance(effect, Offload):
        return Done()
    if isinstance(effect, Summarize):
        old = f" The current value is {stale[0]}." if stale else ""
        return Summary(
            "Goal: go on with the work as it was agreed in the beginning of it.\n"
            f"Done so far: {GHOST} was put into place and the customer was told about it.\n"
            f"Decisions and why: nothing of the earlier rules holds any more.{old}\n"
            "Next step: ask what else there is to do."
        )
    if isinstance(effect, Together):
        return Answers(tuple(notes for each in effect.effects if isinstance(notes := hostile(each, stale), Summary)))
    return Failed("store")


def decided(said: list[Said], known: ConversationState, stale: list[str] | None, *, tokens: int) -> Decision:
    """The decision with the hostile summariser, or without ``stale`` values to bring back with none."""
    flow = plan(talk(*said), settings=SETTINGS, budget=window(tokens), known=known, counter=CHARS4, readings=READINGS)
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        reply = Done() if isinstance(asked, Offload) else Failed("no_model") if stale is None else hostile(asked, stale)


@pytest.mark.requirement("A0.106", "R.55", "R.57", "S.22", "A4.10", "A0.58")
@pytest.mark.parametrize("session", recorded(), ids=lambda each: each.name)
def test_after_ten_rounds_rules_are_byte_identical_and_nothing_is_invented_or_brought_back(session: Session) -> None:
    newer = {value: fact["needles"] for fact in session.facts for value in fact.get("superseded", ())}
    stale = [*newer]
    said, known, rounds = list(session.messages), ConversationState(), 0
    every = "\n".join(m.text for m in said)
    tokens = max(3_000, sum(m.message.tokens for m in said) // 2)
    kept: list[tuple[str, ...]] = []
    number = 0
    while rounds < ROUNDS:
        for _ in range(3):
            number += 1
            said += step(f"Build {number} is green. {words(tokens // 40, f'log{number}')}")
        said += [assistant(f"Build {number} is green."), user(f"Build {number + 1}, please.")]
        every += "\n".join(m.text for m in said[-8:])
        assert number < 400, "the window never fills"
        quiet, decision = known, decided(said, known, stale, tokens=tokens)
        if decision.checkpoint is not None:
            rounds += 1
            state = Checkpoint.from_json(decision.checkpoint)
            kept.append(state.constraints)
            text = next(p.text or "" for p in decision.pieces or () if p.is_summary)
            assert GHOST not in text
            assert GHOST not in decision.checkpoint
            plain = next(p.text or "" for p in decided(said, quiet, None, tokens=tokens).pieces or () if p.is_summary)
            for value in stale:
                assert value not in text or value in plain or _holds(text, newer[value]), f"{value} was replaced"
            unknown = [word for word in literals(state.narrative) if word.lower() not in every.lower()]
            assert unknown == []
        transcript = talk(*said)
        covered = {transcript.messages[i].ref for i in decision.covered}
        assert covered <= {transcript.messages[i].ref for i in decision.removed}, "not all of it is archived"
        known = remember(known, decision, transcript)
    said_by_user = {text for m in said if m.message.role == "user" for text in sentences(m.text)}
    rules = [f["needles"] for f in session.facts if f.get("type") in ("Action", "safety_rule", "hard_constraint")]
    for constraints in kept:
        assert set(constraints) <= said_by_user, "a sentence was reworded"
    for needle in (n for needles in rules for n in needles):
        standing = [any(needle.lower() in text.lower() for text in constraints) for constraints in kept]
        assert standing[-1], f"{needle} is in no constraint"
        assert standing == sorted(standing), f"{needle} was lost on the way"


def _holds(text: str, needles: list[str]) -> bool:
    return all(needle.lower() in text.lower() for needle in needles)
