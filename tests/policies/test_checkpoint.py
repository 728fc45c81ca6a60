import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.ledger import Identifier, Status, Subtask, TaskDecision
from policies.lines import indented
from policies.memory.checkpoint import VERIFY, Checkpoint, InvalidCheckpoint


class Words:
    def count(self, text: str) -> int:
        return (len(text) + 3) // 4


FULL = Checkpoint(
    goal="Move the billing job to the new queue.",
    success_criteria=("No invoice is sent twice.",),
    constraints=("Never touch the ledger table.",),
    subtasks=(
        Subtask("read the worker", Status.DONE),
        Subtask("write the adapter", Status.IN_PROGRESS),
        Subtask("delete the old queue"),
    ),
    decisions=(TaskDecision("use leases", "workers crash", ("locks", "cron")),),
    open_issues=("TimeoutError in test_drain",),
    environment=("branch feature/queue-7",),
    learnings=("the broker batches by 32",),
    notes=("ask Ines about quotas",),
    identifiers=(Identifier("job-4411", "get_job"), Identifier("hidden-1", "log", shown=False)),
    narrative="Half of it is done.",
    version=3,
    window_id=2,
    saved_at="2024-05-01T10:00:00Z",
)


@pytest.mark.requirement("A0.108", "A0.101", "A0.116")
def test_a_checkpoint_survives_json_unchanged() -> None:
    assert Checkpoint.from_json(FULL.to_json()) == FULL
    assert Checkpoint.from_json("{}") == Checkpoint()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"goal": 3}',
        '{"constraints": "x"}',
        '{"subtasks": [{"text": "a", "status": "maybe"}]}',
        '{"version": "1"}',
    ],
)
def test_text_that_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        Checkpoint.from_json(text)


def test_an_unknown_key_is_ignored() -> None:
    assert Checkpoint.from_json(json.dumps({"goal": "g", "later": 1})) == Checkpoint(goal="g")


@pytest.mark.requirement("A0.104", "A0.115", "A0.107", "A0.102")
def test_markdown_shows_every_field_and_marks_what_is_not_done() -> None:
    page = FULL.to_markdown()
    for part in (
        "Never touch the ledger table.",
        "No invoice is sent twice.",
        "the broker batches by 32",
        "use leases",
    ):
        assert part in page
    assert "TODO: delete the old queue" in page
    assert "TODO: read the worker" not in page
    assert "because workers crash" in page
    assert "not: locks; cron" in page
    assert "as of 2024-05-01T10:00:00Z" in page
    assert VERIFY in page
    assert "hidden-1" not in page


@pytest.mark.requirement("A0.109")
def test_of_many_done_subtasks_the_last_ten_are_shown() -> None:
    page = Checkpoint(goal="g", subtasks=tuple(Subtask(f"part {n:02}", Status.DONE) for n in range(12))).to_markdown()
    assert "part 01" not in page
    assert all(f"part {n:02}" in page for n in range(2, 12))


@pytest.mark.requirement("A0.110")
def test_validation_names_every_error_and_warns_of_the_rest() -> None:
    assert FULL.validate().valid
    verdict = Checkpoint(version=0, window_id=0).validate()
    assert not verdict.valid
    assert len(verdict.errors) == 3
    assert Checkpoint(goal="g", subtasks=(Subtask("a"),)).validate().warnings == (
        "subtasks remain but none is in progress",
    )


@pytest.mark.requirement("A0.103")
def test_a_small_bootstrap_keeps_the_goal_and_the_issues_and_drops_the_learnings() -> None:
    wide = Checkpoint(
        goal=FULL.goal,
        subtasks=FULL.subtasks,
        open_issues=FULL.open_issues,
        learnings=tuple(f"long learning number {n} " * 12 for n in range(20)),
    )
    text = wide.bootstrap(max_tokens=300, counter=Words())
    assert Words().count(text) <= 300
    assert all(part in text for part in (FULL.goal, "write the adapter", "TimeoutError in test_drain", VERIFY))
    assert text.count("long learning") < 20 * 12
    assert wide.bootstrap(max_tokens=5, counter=Words()) == ""


@pytest.mark.requirement("A0.105")
def test_the_version_grows_only_after_a_save() -> None:
    assert Checkpoint().advance(goal="g").version == 1
    assert FULL.advance(goal="g").version == 4


@pytest.mark.requirement("A0.103")
def test_three_hundred_tokens_hold_goal_current_and_issues_and_no_learnings_beside_many_constraints() -> None:
    wide = replace(
        FULL,
        constraints=tuple(f"Never touch table number {n} of the ledger." for n in range(40)),
        learnings=tuple(f"long learning number {n} " * 12 for n in range(20)),
    )
    text = wide.bootstrap(max_tokens=300, counter=Words())
    assert Words().count(text) <= 300
    assert all(part in text for part in (FULL.goal, "write the adapter", "TimeoutError in test_drain", VERIFY))
    assert "long learning" not in text
    shown = text.count("Never touch table number")
    assert 0 < shown < 40
    assert f"… and {40 - shown} more in the checkpoint" in text


@pytest.mark.requirement("A0.103")
def test_a_goal_larger_than_the_cap_is_cut_with_a_ref_and_costs_nothing_else_its_place() -> None:
    wide = replace(FULL, goal="Move the billing job. " * 400)
    text = wide.bootstrap(max_tokens=300, counter=Words(), ref="0123456789ab")
    assert Words().count(text) <= 300
    assert "archived as 0123456789ab" in text
    for part in ("write the adapter", "TimeoutError in test_drain", "Never touch the ledger table."):
        assert part in text
    assert "checkpoint 2.3" in wide.bootstrap(max_tokens=300, counter=Words())
    alone = Checkpoint(goal=wide.goal).bootstrap(max_tokens=2_600, counter=Words())
    assert wide.goal in alone


@pytest.mark.requirement("A0.109", "A0.115", "A0.107", "A0.102", "D12")
def test_a_roomy_bootstrap_has_everything_with_window_version_and_the_moment() -> None:
    text = FULL.bootstrap(max_tokens=2_000, counter=Words())
    first = text.splitlines()[0]
    assert first.startswith("Resuming from checkpoint: window 2, version 3, saved 2024-05-01T10:00:00Z.")
    assert VERIFY in first
    for part in (
        FULL.goal,
        "Never touch the ledger table.",
        "No invoice is sent twice.",
        "TODO: delete the old queue",
        "- read the worker",
        "use leases (because workers crash) [not: locks; cron]",
        "Environment (as of 2024-05-01T10:00:00Z):",
        "the broker batches by 32",
        "ask Ines about quotas",
        "Half of it is done.",
        "job-4411 (get_job)",
    ):
        assert part in text
    assert "hidden-1" not in text


@pytest.mark.requirement("A0.109")
def test_a_bootstrap_shows_the_last_ten_done_the_first_ten_left_and_the_last_five_decisions() -> None:
    wide = Checkpoint(
        goal="g",
        subtasks=(
            *(Subtask(f"done {n:02}", Status.DONE) for n in range(12)),
            *(Subtask(f"left {n:02}") for n in range(12)),
        ),
        decisions=tuple(TaskDecision(f"choice {n}") for n in range(7)),
        open_issues=tuple(f"Error number {n:02}" for n in range(15)),
    )
    text = wide.bootstrap(max_tokens=2_000, counter=Words())
    assert ("done 01" in text, "done 02" in text, "done 11" in text) == (False, True, True)
    assert ("left 09" in text, "left 10" in text) == (True, False)
    assert ("choice 1" in text, "choice 2" in text, "choice 6" in text) == (False, True, True)
    assert all(issue in text for issue in wide.open_issues)


def test_a_constraint_that_the_goal_says_is_not_said_twice_unless_the_goal_was_cut() -> None:
    rule = "Never touch the ledger table."
    state = Checkpoint(goal=f"Move the job. {rule}", constraints=(rule,))
    assert state.bootstrap(max_tokens=400, counter=Words()).count(rule) == 1
    longer = replace(state, goal=f"{'Move the job. ' * 200}{rule}{' And so on.' * 200}")
    assert longer.bootstrap(max_tokens=300, counter=Words()).count(f"- {rule}") == 1


@pytest.mark.requirement("A0.105", "A0.114", "A0.110")
def test_a_state_of_an_older_version_or_window_is_stale() -> None:
    assert FULL.is_newer(None)
    assert not FULL.is_newer(FULL)
    assert replace(FULL, version=4).is_newer(FULL)
    assert not replace(FULL, version=2).is_newer(FULL)
    assert not replace(FULL, version=4, window_id=1).is_newer(FULL)
    assert replace(FULL, version=4, window_id=3).is_newer(FULL)
    stale = FULL.validate(after=FULL)
    assert stale.errors == ("stale: window 2, version 3 does not follow window 2, version 3",)
    assert replace(FULL, version=4).validate(after=FULL).valid


@pytest.mark.requirement("A0.110")
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (replace(FULL, goal=" "), "no goal"),
        (replace(FULL, window_id=0), "window_id 0 is below 1"),
        (replace(FULL, version=0), "version 0 is below 1"),
    ],
)
def test_each_rule_of_validation_has_its_own_error(broken: Checkpoint, error: str) -> None:
    assert broken.validate().errors == (error,)
    assert not broken.validate().valid


def test_a_delta_names_what_changed_and_nothing_else() -> None:
    later = replace(
        FULL,
        subtasks=(Subtask("read the worker", Status.DONE), Subtask("write the adapter", Status.DONE), Subtask("ship")),
        open_issues=(),
        decisions=(*FULL.decisions, TaskDecision("keep Redis")),
        version=4,
        marks=("1:aa",),
    )
    assert later.delta(FULL) == {
        "subtasks": {
            "added": ["planned: ship"],
            "removed": ["planned: delete the old queue"],
            "changed": ["done: write the adapter"],
        },
        "decisions": {"added": ["keep Redis"], "removed": []},
        "open_issues": {"added": [], "removed": ["TimeoutError in test_drain"]},
        "version": {"from": 3, "to": 4},
    }
    assert FULL.delta(FULL) == {}
    assert json.loads(json.dumps(FULL.delta(None)))["goal"] == {"from": "", "to": FULL.goal}


@pytest.mark.requirement("A0.106")
def test_coverage_is_the_share_of_literals_that_the_state_shows() -> None:
    assert FULL.coverage([]) == 1.0
    assert FULL.coverage(["JOB-4411", "feature/queue-7"]) == 1.0
    assert FULL.coverage(["job-4411", "hidden-1", "test_drain", "absent-7"]) == 0.5


@settings(max_examples=80, deadline=None)
@given(
    st.text(max_size=800),
    st.lists(st.text(max_size=120), max_size=12),
    st.lists(st.text(max_size=120), max_size=6),
    st.integers(min_value=0, max_value=500),
)
def test_a_bootstrap_never_exceeds_its_cap_and_tells_of_every_constraint(
    goal: str, constraints: list[str], issues: list[str], cap: int
) -> None:
    state = Checkpoint(goal=goal, constraints=tuple(constraints), open_issues=tuple(issues))
    text = state.bootstrap(max_tokens=cap, counter=Words())
    assert Words().count(text) <= cap
    assert Checkpoint.from_json(state.to_json()) == state
    if cap >= 120 and any(indented(c) not in text for c in constraints):
        assert "more in the checkpoint (constraints)" in text
