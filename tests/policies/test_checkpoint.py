import pytest

from policies.ledger import Identifier, Status, Subtask, TaskDecision
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
