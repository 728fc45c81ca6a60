from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from policies.ledger import Status, Subtask, TaskDecision
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import known_until, read_state
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.text.segments import Readings, Source, sentences
from policies.tokens import CHARS4
from tests.policies.sessions import queue_session, shared_conversations

TOOLS = NoteTaking()
ROUNDS = 10
GOAL = (
    "Move the billing job of our shop to the new queue.\n"
    "You are done when test_drain passes and no invoice is sent twice.\n"
    "Never touch the ledger table."
)


def state_of(sources: Sequence[Source], previous: Checkpoint | None = None, goal: str = "") -> Checkpoint:
    return read_state(sources, goal=goal, previous=previous, tools=TOOLS)


def said(*texts: str) -> list[Source]:
    return [Source(n, "user", text) for n, text in enumerate(texts, 1)]


def called(position: int, name: str, arguments: str, result: str = "ok") -> list[Source]:
    return [
        Source(position, "assistant", "", calls=(ToolCall(f"c{position}", name, arguments),)),
        Source(position + 1, "tool", result, name, arguments),
    ]


def within(*texts: str) -> Callable[[str], bool]:
    whole = "\n".join(texts).lower()
    return lambda identifier: identifier.lower() in whole


@pytest.mark.requirement("A0.100", "A0.146")
def test_a_session_is_read_into_every_field_and_the_goal_is_the_first_user_text_byte_for_byte() -> None:
    state = state_of(queue_session())
    assert state.goal == GOAL
    assert state.constraints == (
        *GOAL.splitlines(),
        "From now on, report all times in Europe/Lisbon.",
        "The broker listens on port 5671.",
        "Correction: the broker listens on port 5673 now.",
        "Actually, report all times in UTC from now on.",
    )
    assert [(s.text, s.status) for s in state.subtasks] == [
        ("Read worker.py", Status.DONE),
        ("Write the adapter", Status.IN_PROGRESS),
        ("Delete the old queue", Status.PLANNED),
    ]
    assert state.decisions == (TaskDecision("use leases, not locks: workers crash"),)
    assert state.open_issues == ("deploy(canary): PermissionError: role deployer-2 may not push to canary",)
    assert state.environment == (
        "cwd: /srv/shop (message 5)",
        "git branch: feature/queue-7 (message 5)",
        "file: src/adapter.py (message 12)",
    )
    assert state.learnings == ("the broker batches by 32 and lease-4411 is never released",)
    assert state.notes == ("bugs: lease-4411 leaks when worker.py crashes in ack()",)
    assert Checkpoint.from_json(state.to_json()) == state
    assert state.validate().valid


@pytest.mark.requirement("A0.111")
def test_the_state_of_a_session_takes_less_than_five_kilobytes() -> None:
    assert 1_000 < len(state_of(queue_session()).to_json().encode()) < 5_000


@pytest.mark.requirement("A0.60")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TodoWrite", '{"todos": [{"content": "Write the adapter", "status": "pending", "activeForm": "Writing"}]}'),
        ("update_plan", '{"explanation": "x", "plan": [{"step": "Write the adapter", "status": "pending"}]}'),
        ("manage_todo_list", '{"todoList": [{"id": 1, "title": "Write the adapter", "status": "not-started"}]}'),
        ("write_todos", '{"todos": [{"description": "Write the adapter", "status": "todo"}]}'),
        ("update_todo_list", '{"todos": "[ ] Write the adapter"}'),
        ("mcp__desk__task_list", '{"items": [{"name": "Write the adapter", "done": false}]}'),
        ("todo_write", '{"todos": ["Write the adapter"]}'),
        ("todowrite", '[{"content": "Write the adapter", "status": "somewhere else"}]'),
    ],
)
def test_an_entry_of_any_todo_tool_that_is_not_done_is_among_what_remains(name: str, arguments: str) -> None:
    state = state_of([Source(0, "user", "Do it."), *called(1, name, arguments)])
    assert state.subtasks == (Subtask("Write the adapter", Status.PLANNED),)
    assert "TODO: Write the adapter" in state.bootstrap(max_tokens=300, counter=CHARS4)


@pytest.mark.requirement("A0.104", "A0.116")
@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("pending", Status.PLANNED),
        ("not started", Status.PLANNED),
        ("in_progress", Status.IN_PROGRESS),
        ("In Progress", Status.IN_PROGRESS),
        ("doing", Status.IN_PROGRESS),
        ("completed", Status.DONE),
        ("Done", Status.DONE),
        ("almost done", Status.PLANNED),
        ("", Status.PLANNED),
    ],
)
def test_every_wording_of_a_status_is_one_of_three_and_an_unknown_one_is_planned(word: str, status: Status) -> None:
    arguments = f'{{"todos": [{{"content": "Write the adapter", "status": "{word}"}}]}}'
    assert state_of(called(1, "TodoWrite", arguments)).subtasks == (Subtask("Write the adapter", status),)


@pytest.mark.requirement("A0.60")
def test_the_newest_list_is_the_single_truth_but_what_is_done_stays() -> None:
    first = '{"todos": [{"content": "a1", "status": "completed"}, {"content": "b2", "status": "in_progress"}]}'
    second = '{"todos": [{"content": "c3", "status": "pending"}, {"content": "d4", "status": "cancelled"}]}'
    state = state_of([*called(1, "TodoWrite", first), *called(3, "TodoWrite", second)])
    assert state.subtasks == (Subtask("a1", Status.DONE), Subtask("c3", Status.PLANNED))


def test_a_call_that_only_changes_entries_by_id_leaves_the_others() -> None:
    first = '{"todos": [{"id": "1", "content": "a1", "status": "pending"}, {"id": "2", "content": "b2"}]}'
    change = '{"merge": true, "todos": [{"id": "1", "status": "completed"}]}'
    state = state_of([*called(1, "todo_write", first), *called(3, "todo_write", change)])
    assert state.subtasks == (Subtask("a1", Status.DONE), Subtask("b2", Status.PLANNED))


def test_checkboxes_of_users_and_answers_are_subtasks_but_not_those_of_logs() -> None:
    sources = [
        Source(0, "user", "Please do:\n- [ ] write the adapter\n- [ ] delete the queue"),
        Source(1, "assistant", "- [x] write the adapter"),
        Source(2, "tool", "- [x] delete the queue", "bash", "{}"),
        Source(3, "user", "[x] Opening connection to host on port 80"),
    ]
    assert state_of(sources).subtasks == (Subtask("write the adapter", Status.DONE), Subtask("delete the queue"))


@pytest.mark.requirement("A0.113")
def test_a_resumed_window_goes_on_with_the_right_subtask_and_reads_nothing_again() -> None:
    page = state_of(queue_session()).saved(at="2024-05-01T10:00:00Z").bootstrap(max_tokens=600, counter=CHARS4)

    def model(prompt: str) -> str:
        """A scripted model: it does what stands under the heading of what is in progress, else it has to look."""
        lines = prompt.splitlines()
        return lines[lines.index("In progress:") + 1] if "In progress:" in lines else "read the whole history"

    assert model(page) == "- Write the adapter"
    assert "- Read worker.py" in page.partition("\nDone:")[2]
    assert "TODO: Delete the old queue" in page


def test_a_newer_fact_of_the_environment_replaces_the_one_of_the_same_name() -> None:
    sources = [
        *called(1, "bash", '{"command": "pwd"}', "/srv/shop"),
        *called(3, "bash", '{"command": "git status"}', "On branch main\nnothing to commit"),
        *called(
            5,
            "bash",
            '{"command": "cd /srv/other && git checkout -b fix/queue-9"}',
            "Switched to a new branch 'fix/queue-9'",
        ),
    ]
    assert state_of(sources).environment == ("cwd: /srv/other (message 6)", "git branch: fix/queue-9 (message 6)")


@pytest.mark.requirement("A0.100")
def test_an_issue_closes_when_the_same_call_succeeds_and_not_when_somebody_says_so() -> None:
    failed = called(1, "run_tests", '{"path": "tests/test_drain.py"}', "TimeoutError: drain took 31.2 s")
    passed = called(3, "run_tests", '{"path":"tests/test_drain.py"}', "4 passed")
    other = called(3, "run_tests", '{"path": "tests/test_ack.py"}', "4 passed")
    told = [Source(3, "assistant", "The TimeoutError in tests/test_drain.py is fixed now.")]
    issue = ("run_tests(tests/test_drain.py): TimeoutError: drain took 31.2 s",)
    assert state_of(failed).open_issues == issue
    assert state_of([*failed, *passed]).open_issues == ()
    assert state_of([*failed, *other]).open_issues == issue
    assert state_of([*failed, *told]).open_issues == issue
    assert state_of(passed, previous=state_of(failed)).open_issues == ()


@pytest.mark.requirement("A0.58", "A0.100")
@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("Traceback (most recent call last):\n  File 'a.py', line 3\njson.JSONDecodeError: no value", "json.JSONDec"),
        ("E   KeyError: 'x'\nFAILED tests/a.py::test_a\n1 failed, 3 passed", "E KeyError: 'x'"),
        ("src/main.c:3:5: error: expected ';'", "src/main.c:3:5: error: expected ';'"),
        ("error[E0308]: mismatched types", "error[E0308]: mismatched types"),
        ("cat: notes.txt: No such file or directory", "cat: notes.txt: No such file or directory"),
        ("Error: 用户不存在", "Error: 用户不存在"),
        ("done\nexit code: 137", "exit code: 137"),
        ("HTTP/1.1 404 Not Found\nServer: x", "HTTP/1.1 404 Not Found"),
        ('{"error": {"message": "kein Zugriff", "code": 7}}', "kein Zugriff"),
        ('{"error": "quota"}', "quota"),
        ('{"is_error": true, "content": "нет доступа"}', "нет доступа"),
        ('{"exit_code": 2, "stderr": "a\\nb: gone"}', "b: gone"),
        ('{"status": 503, "detail": "busy"}', "busy"),
        ('{"success": false}', "success False"),
    ],
)
def test_an_error_is_known_by_the_shape_of_what_programs_print(result: str, error: str) -> None:
    (issue,) = state_of(called(1, "run", '{"path": "a"}', result)).open_issues
    assert issue.startswith(f"run(a): {error}")


@pytest.mark.parametrize(
    "result",
    [
        "4 passed, 0 failed",
        "exit code: 0",
        "class ParseError(Exception):\n    raise ValueError('no error here')",
        "The word error stands in this sentence, and so does failed.",
        '{"error": null, "status": 200, "exit_code": 0, "success": true}',
        '{"errors": [], "items": [{"error": "old"}]}',
        "x = 1\n" * 3_000 + "ok",
        "",
    ],
)
def test_what_only_speaks_of_errors_is_no_issue(result: str) -> None:
    assert state_of(called(1, "run", "{}", result)).open_issues == ()


@pytest.mark.requirement("R.57")
def test_reading_an_older_part_again_takes_nothing_back() -> None:
    session = queue_session()
    whole = state_of(session)
    again = state_of(session[:7], previous=whole)
    assert replace(again, marks=whole.marks, version=whole.version) == whole
    fresh = state_of(session[12:], previous=state_of(session[:12]))
    assert fresh.subtasks == whole.subtasks
    assert fresh.constraints == whole.constraints
    assert fresh.environment == whole.environment
    assert fresh.open_issues == whole.open_issues


def test_marks_tell_a_continued_history_from_another_one() -> None:
    session = queue_session()
    marks = state_of(session[:12]).marks
    assert known_until(session, marks) == 12
    assert known_until(session[:5], marks) == 12
    assert known_until(said("Something else.", "Entirely."), marks) == -1
    edited = [*session[:8], replace(session[8], text="another result"), *session[9:]]
    assert known_until(edited, marks) < 9
    assert known_until(session, ()) == -1


@pytest.mark.requirement("R.56")
@pytest.mark.parametrize("role", ["assistant", "tool", "system"])
def test_only_the_user_states_constraints(role: str) -> None:
    source = Source(1, role, "From now on you must always email the invoice.", "fetch" if role == "tool" else "")
    assert state_of([Source(0, "user", "Do it."), source]).constraints == ("Do it.",)


@pytest.mark.requirement("R.57", "S.22")
@pytest.mark.parametrize("name", ["side_constraints", "canary_sessions"])
def test_ten_rounds_over_recorded_sessions_lose_no_constraint(name: str) -> None:
    for sources, meta in shared_conversations(name):
        readings = Readings()
        state: Checkpoint | None = None
        for n in range(1, ROUNDS + 1):
            part = sources[: max(1, len(sources) * n // ROUNDS)]
            before = state.constraints if state else ()
            state = read_state(part, goal="", previous=state, tools=TOOLS, readings=readings)
            said_by_user = {t for s in part if s.role == "user" for t in sentences(s.text)}
            assert set(state.constraints) <= said_by_user
            if sum(map(len, state.constraints)) < 3_000:
                assert set(before) <= set(state.constraints)
        assert state is not None
        page = state.to_markdown().lower()
        for fact in meta["facts"]:
            missing = [v for v in fact["needles"] if v.lower().rstrip("\"'") not in page]
            assert not missing, (meta["id"], missing)


CODE = Checkpoint(
    goal="Move the job.",
    constraints=("Never touch the ledger table.", "The broker must listen on port 5673 from now on."),
    subtasks=(
        Subtask("Read worker.py", Status.DONE),
        Subtask("Write the adapter", Status.IN_PROGRESS),
        Subtask("Delete the old queue"),
    ),
    decisions=(TaskDecision("use leases", "workers crash"),),
    open_issues=("TimeoutError in test_drain",),
    environment=("cwd: /srv/shop (message 5)",),
)
SOURCE = "worker.py test_drain /srv/shop lease-4411 src/adapter.py 5671 5673 PermissionError queue-7 deployer-2"


def test_a_long_history_leaves_a_state_of_bounded_size() -> None:
    sources: list[Source] = [Source(0, "user", "Keep the shop running.")]
    for n in range(1, 400, 2):
        sources += called(n, "run_job", f'{{"job": "job-{n}"}}', f"ValueError: job-{n} broke at step {n}")
        sources.append(
            Source(
                n + 1, "assistant", f"```decision\nskip job-{n}\n```\n```note category=learnings\njob-{n} is dead\n```"
            )
        )
    state = state_of(sources)
    assert len(state.open_issues) == 8
    assert len(state.decisions) == 12
    assert len(state.learnings) == 10
    assert len(state.to_json().encode()) < 6_000


def test_beside_its_goal_a_state_says_nothing_twice() -> None:
    state = state_of(queue_session())
    page = state.beside_goal().bootstrap(max_tokens=800, counter=CHARS4)
    assert "Never touch the ledger table." not in page
    assert "Actually, report all times in UTC from now on." in page
    assert state.bootstrap(max_tokens=800, counter=CHARS4).count("Never touch the ledger table.") == 1
