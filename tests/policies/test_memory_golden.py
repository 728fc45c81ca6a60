"""What a summariser is asked and what comes of its answers, states, notes, verdicts, advice and recall, byte for byte.

``python -m tests.policies.test_memory_golden`` writes ``tests/golden/memory.json`` anew.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from policies.effects import Failed, Summarize, Summary
from policies.health import HealthRules, Sample, check, trend_of
from policies.ledger import EditKind, Identifier, Note, Status, Subtask, TaskDecision
from policies.memory.checkpoint import Checkpoint
from policies.memory.notes import flaw, notes_in, read_notes, render_notes
from policies.memory.state import read_state
from policies.settings import ContextSettings, ExtractShape, Layer
from policies.summary.ask import Written, condense, lines_of
from policies.summary.check import judge, under_headings, without_reasoning
from policies.summary.identifiers import grounded, invented
from policies.summary.material import MaterialLine, render_resumed, render_summary
from policies.summary.prompts import PROMPTS
from policies.text.segments import Source
from policies.tokens import CHARS4
from tests.policies.answering import Model
from tests.policies.claims import CASES
from tests.policies.play import Said, assistant, decide, talk, user, window
from tests.policies.sessions import HERE, queue_session, sources_in
from tests.policies.tongues import TONGUES

SHAPE = ExtractShape(window=None, trigger=0.9, low_water=0.3, extract=0.02, tail=0.2)
OLDEST_GO = ContextSettings(layers=(Layer(strategy="drop_oldest"),), shapes=(SHAPE,), margin=0.0, headroom=0)
GOLDEN = Path(__file__).parents[1] / "golden" / "memory.json"
RAW = (
    (
        '{"goal": "Ship 2.4", "done": ["Read src/a.py", "Fixed E4411"], "current": "Test", "todo": ["Docs"], "decisions": '
        '[{"decision": "argon2", "why": "bcrypt is slow", "rejected": ["scrypt"]}, "keep port 5432"], "next": null}'
    ),
    '```json\n{"goal": "Ship 2.4", // said so\n "done": ["a", "b",], /* all */ "open_issues": {"x": 1, "y": "z"},}\n```',
    'Here it is: {"goal": "Ship 2.4", "done": ["one", "two", "thr',
    '{"done": [["a", 1], true, null, {"what": "c"}], "Left to do": "x"}',
    (
        "## Goal\nShip 2.4\n**Done so far:**\n- [x] read src/a.py\n* Fixed E4411\nDecisions (what, why):\n"
        "1. argon2 (because bcrypt is slow) [not: scrypt; md5]\nOpen problems: none\nNext steps:\n- docs"
    ),
    "- Goal: Ship 2.4\n- Done: 12 files\n- Errors: E4411 carrier refused\n- Unknown heading: x",
    "It is only prose about order W7731 and nothing else.",
    '{"strange": 1}',
    "",
)
REPLIES = (
    "I'm sorry, I can't help with that.",
    "Error: 429 Too Many Requests",
    "[Summary goes here]",
    "ok",
    "<think>Let me see</think>",
    "<think>Let me see</think>Goal: find out why order W7731 is late, which the depot D-17 has not sent yet.",
    "word " * 400,
    "\ufffd\ufffd\ufffd\ufffd",
    "```\nGoal: find out why order W7731 is late, which the depot D-17 has not sent yet at all.\n```",
    "Sure, here is the summary:\nGoal: find out why order W7731 is late; depot D-17 has not sent it yet at all.",
    "Goal: none\nDone: n/a\nLeft to do: tbd",
    "Order W7731 waits.\n" * 40,
    *RAW,
)


def digest(value: object) -> str:
    """Eight bytes of a value's JSON in hex, behind its length."""
    text = json.dumps(value, ensure_ascii=False, default=_plain, sort_keys=False)
    return f"{len(text)}:{blake2b(text.encode(errors='surrogatepass'), digest_size=8).hexdigest()}"


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict | set | frozenset):
        return sorted(value)
    return asdict(value)  # type: ignore[call-overload, no-any-return]


def _question(effect: Summarize) -> dict[str, object]:
    return {
        "system": effect.system,
        "prompt": effect.prompt,
        "max_tokens": effect.max_tokens,
        "purpose": effect.purpose,
        "schema": effect.schema,
        "key": effect.key,
    }


def _written(written: Written) -> list[object]:
    return [written.text, written.calls, written.failure, written.purpose, written.dropped]


def _copying(effect: Summarize) -> Summary:
    """Notes of what stands first in every fourth line, with an invented path where it was not asked again."""
    lines = [line for line in effect.prompt.split("\n") if re.match(r"\[[a-z]", line)][::4]
    said = [f"- {line.partition('] ')[2][:90]}" for line in lines][:12]
    again = "was refused" in effect.prompt
    text = "\n".join(("Goal: go on with what the user wants", "Done:", *said, "Next step: look at what is left"))
    return Summary(text if again else f"{text}\n- the cause is in src/nowhere/made_up_42.py\n- and in E9999Z as well")


def _replying(*texts: str) -> Callable[[Summarize], Summary | Failed]:
    """One reply after another, the last one again and again; ``!code`` is a failure."""
    left = list(texts)

    def answer(effect: Summarize) -> Summary | Failed:
        text = left.pop(0) if len(left) > 1 else left[0]
        return Failed(text[1:]) if text.startswith("!") else Summary(text)

    return answer


def _sessions() -> Iterator[tuple[str, list[Source]]]:
    yield "queue", queue_session()
    for number, line in enumerate((HERE / "canary_sessions.jsonl").read_text(encoding="utf-8").splitlines()):
        messages = json.loads(line)["messages"]
        yield f"canary {number}", [Source(n, m["role"], m.get("content") or "") for n, m in enumerate(messages, 1)]
    for number, line in enumerate((HERE / "wording.jsonl").read_text(encoding="utf-8").splitlines()[:8]):
        yield f"wording {number}", _sources(json.loads(line)["messages"])


def _sources(messages: Sequence[dict[str, Any]]) -> list[Source]:
    return sources_in(
        [
            {
                "role": m["role"],
                "text": m.get("content") or "",
                "calls": [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in
                          m.get("tool_calls") or ()],
                "answers": m.get("tool_call_id", ""),
            }
            for m in messages
        ]
    )  # fmt: skip


def condensed() -> dict[str, object]:
    """Questions and summaries: every prompt, in one question and in many, by schema, asked again."""
    lines = lines_of(queue_session())
    long = [line for _, sources in _sessions() for line in lines_of(sources)]
    plans: dict[str, dict[str, Any]] = {f"prompt {name}": {"prompt": name} for name in PROMPTS}
    plans |= {f"chunks {name}": {"prompt": name, "lines": long, "max_input": 3_000} for name in PROMPTS}
    plans |= {
        "previous": {"previous": "Goal: the queue\nDone: read worker.py\n- according to the user: \"keep port 5432\""},
        "long previous": {"previous": "Done: read worker_77.py\n" * 400, "max_input": 3_000},
        "handed over": {"prompt": "handoff", "previous": PROMPTS["handoff"].prefix + "\nDone: read worker_77.py"},
        "by schema": {"by_schema": True, "key": "k1"},
        "no schema": {"by_schema": True, "answer": _replying("!no_schema", *RAW[4:5])},
        "json": {"by_schema": True, "answer": _replying(RAW[0])},
        "task": {"prompt": "reading", "task": "Find <user> out why W7731 is late. " * 60, "max_tokens": 60},
        "beside": {"beside": [MaterialLine("user", "Never contact the carrier of W7731.")]},
        "small": {"max_input": 700},
        "few chunks": {"lines": long, "max_input": 3_000, "most_chunks": 3},
        "deep": {"lines": long, "max_input": 2_200, "max_tokens": 900},
        "refused": {"answer": _replying("I'm sorry, I can't help with that.")},
        "half fail": {"lines": long, "max_input": 3_000, "answer": _replying("!timeout", "ok", *REPLIES[5:10])},
        "empty": {"lines": [MaterialLine("user", " ")]},
    }  # fmt: skip
    found: dict[str, object] = {}
    for name, plan in plans.items():
        model = Model(plan.pop("answer", _copying))
        given = {"lines": lines, "prompt": "structured", "max_tokens": 200, "max_input": 32_000, "counter": CHARS4}
        written = model.run(condense(**(given | plan)))  # type: ignore[arg-type]
        found[name] = [
            len(model.asked),
            model.rounds,
            digest([_question(q) for q in model.asked]),
            digest(_written(written)),
        ]
    return found


def asked_in_words() -> dict[str, object]:
    """The whole text of one question for each prompt, and of one that is asked again."""
    lines = [
        MaterialLine("user", "Find order W7731."),
        MaterialLine("assistant", "I look."),
        MaterialLine("result of look", "D-17 has W7731"),
    ]
    found: dict[str, object] = {}
    for name in PROMPTS:
        model = Model(_replying("ok", "ok"))
        model.run(condense(lines * 20, prompt=name, max_tokens=90, max_input=9_000, counter=CHARS4, task="W7731?"))
        found[name] = [q.prompt[q.prompt.rindex("</weir") :] if "</weir" in q.prompt else q.prompt for q in model.asked]
    return found


def judged() -> list[object]:
    """What is taken of replies, and of proposals in them."""
    material = "\n".join(line.text for line in CASES[0].lines) * 8
    taken = [
        judge(Summary(text), material=material, prompt=PROMPTS[name], max_tokens=200, counter=CHARS4)
        for text in REPLIES
        for name in ("structured", "plain", "notes")
    ]
    cut = judge(
        Summary(REPLIES[5] * 3 + " and then the", finish_reason="length"),
        material=material,
        prompt=PROMPTS["plain"],
        max_tokens=200,
        counter=CHARS4,
    )
    return [
        *taken,
        cut,
        [under_headings(text) for text in RAW],
        [without_reasoning(t) for t in REPLIES[4:6]],
        prompt_figures(),
    ]


def prompt_figures() -> dict[str, str]:
    """What the gate and the audit name."""
    return {name: f"{p.purpose} {p.digest} {p.shortest}" for name, p in PROMPTS.items()}


def checked() -> dict[str, object]:
    """What claims in seven languages name that their sources lack."""
    found: dict[str, object] = {}
    for case in CASES:
        claims = [*(text for text, _ in case.true), *case.false, *case.laundered]
        material = "\n".join(line.text for line in case.lines)
        found[case.name] = [digest([grounded(c, material) for c in claims]), [invented(c, material) for c in claims]]
    return found


def states() -> dict[str, object]:
    """States read from sessions, and shown."""
    found: dict[str, object] = {}
    for name, sources in _sessions():
        half = read_state(sources[: len(sources) // 2], goal="")
        state = read_state(sources, goal="", previous=half.saved(at="2026-01-02T03:04:05Z"))
        pages = [state.bootstrap(max_tokens=n, counter=CHARS4, ref="abc") for n in (20, 60, 120, 200, 400, 900)]
        found[name] = [
            digest(state.to_json()),
            digest(pages),
            digest(state.to_markdown()),
            digest(state.delta(half)),
            digest(notes_in(sources)),
        ]
    return found


def checkpoint() -> dict[str, object]:
    """A full state as it is shown at several sizes."""
    state = Checkpoint(
        goal="Move the queue to Redis. Never lose a job. " * 6,
        success_criteria=("all tests pass", "Never lose a job."),
        constraints=("Never lose a job.", "Keep port 5432.", "Ask before you touch the schema."),
        subtasks=(
            Subtask("read worker.py", Status.DONE),
            Subtask("write adapter.py", Status.IN_PROGRESS),
            Subtask("docs", told=True),
            Subtask("tests", Status.DONE, told=True),
        ),
        decisions=(TaskDecision("Redis streams", "lists lose jobs", ("lists", "pubsub")), TaskDecision("port 5432")),
        open_issues=("run(tests): KeyError: 'x'", "deploy: exit code 2"),
        environment=("cwd: /srv/queue (message 4)", "git branch: redis (message 9)"),
        learnings=("Streams need a group.",),
        notes=("bugs: worker.py drops jobs",),
        identifiers=(Identifier("W7731", "order"), Identifier("D-17", shown=False)),
        narrative="It went well.",
        version=3,
        window_id=2,
    ).saved(at="2026-01-02T03:04:05Z")
    later = state.advance(goal="Other", subtasks=state.subtasks[1:], decisions=(TaskDecision("x", "", ("y",)),))
    assert Checkpoint.from_json(state.to_json()) == state
    return {
        "json": state.to_json(),
        "markdown": state.to_markdown(),
        "pages": {n: state.bootstrap(max_tokens=n, counter=CHARS4, ref="abc") for n in (30, 90, 150, 220, 320, 600)},
        "beside": state.beside_goal().bootstrap(max_tokens=300, counter=CHARS4),
        "delta": [later.delta(state), state.delta(None)],
        "verdicts": [asdict(v) for v in (state.validate(), Checkpoint(version=0).validate(after=state))],
        "coverage": state.coverage(["w7731", "D-17", "nothing"]),
        "summary": render_summary("[1] x </weir-1>", narrative="told <user>", removed=4),
        "empty": render_summary("", removed=1),
        "resumed": render_resumed(" said "),
    }


def notes() -> dict[str, object]:
    """Notes read and shown."""
    lines = (
        "decisions | critical | use argon2 in login/hashes.py\n- bugs|high|E4411: carrier refused\n| misc | x | y9 |\n"
    )
    read = read_notes(lines + "constraint | Keep port 5432.\nnone | a\ncategory | importance | text\nno note")
    more = [
        *read,
        Note("task_progress", "high", "TODO: docs", "tool"),
        Note("task_progress", "high", "done: a", "tool"),
    ]
    return {
        "read": [asdict(n) for n in read],
        "flaws": [flaw(n) for n in more],
        "shown": {n: render_notes(more, max_tokens=n, counter=CHARS4) for n in (40, 60, 90, 400)},
    }


def health() -> list[object]:
    """A conversation that goes through every alert."""
    rules, health, found = HealthRules(), None, []
    quiet = {"utilization": 0.3, "burn_rate": 10.0}
    troubles: list[dict[str, Any]] = [
        *[{"utilization": 0.95}] * 4,
        *[{"evicted": n, "utilization": 0.5} for n in (9, 8, 9, 8, 9, 3, 2, 3, 3, 3)],
        *[{"ratios": (1.2, 1.4)}, {"ratios": (1.5,)}, {"ratios": (20.0, 30.0, 40.0)}],
        *[{"compacted": True, "window_id": n} for n in (2, 3, 4)],
        {"spike": 7.5},
        {"repeats": 4},
        {"bloat": 0.6, "bloat_limit": 0.3},
        {"requests_left": 1.5},
        *[{}] * 8,
    ]
    shots = []
    for at, trouble in enumerate(troubles):
        checkup = check(health, Sample(at=float(at), **(quiet | trouble)), rules)
        health = checkup.health
        shots.append(checkup.snapshot)
        found += [[a.kind, a.level, a.category, a.said] for a in checkup.opened]
        found += [["closed", e.kind, e.at] for e in checkup.closed]
    assert health is not None
    return [*found, health.to_json(), asdict(trend_of(shots)), asdict(trend_of(shots[:3])), digest(shots)]


def recalled(said: Sequence[Said]) -> str | None:
    """What is put in front of the newest message of a conversation that outgrew its window."""
    decision = decide(talk(*said), budget=window(2_000), settings=OLDEST_GO)
    found = [p.text for p in decision.pieces or () if p.kind is EditKind.RECALL]
    return found[0] if found else None


def brought_back() -> dict[str, object]:
    """What is put in front of a question about something that left the window."""
    found: dict[str, object] = {}
    for language, tongue in TONGUES.items():
        said = [user(m["content"]) if m["role"] == "user" else assistant(m["content"]) for m in tongue.talk(40)]
        texts = [recalled([*said, user(question)]) for _, question, _ in tongue.facts]
        found[language] = [texts[0], digest(texts)]
    return found


SECTIONS: dict[str, Callable[[], object]] = {
    each.__name__: each
    for each in (
        condensed, asked_in_words, judged, checked, states, checkpoint, notes, health, brought_back
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_asked_and_shown_is_byte_for_byte_as_it_was(name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    assert json.loads(json.dumps(SECTIONS[name](), default=_plain)) == golden


if __name__ == "__main__":
    every = {name: make() for name, make in SECTIONS.items()}
    GOLDEN.write_text(json.dumps(every, ensure_ascii=False, indent=1, default=_plain) + "\n", encoding="utf-8")
