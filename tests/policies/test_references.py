"""Which results the model used, by the identifiers that come back in what it says and does later."""

import cProfile
import json
import pstats

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.messages import ToolCall, Transcript, answered_calls, units
from policies.scoring.redundancy import HOLDERS, References, last_references
from tests.policies.play import Said, assistant, result, step, system, talk, user, words


def referenced(*said: Said | tuple[Said, ...]) -> dict[int, References]:
    return references_of(talk(*said))


def references_of(transcript: Transcript) -> dict[int, References]:
    return last_references(transcript, answered_calls(transcript, units(transcript.messages, transcript.head)))


def call(text: str, tool: str = "read_file", **arguments: object) -> tuple[Said, Said]:
    """A step of one call, answered by a result that says nothing."""
    return step(text, tool=tool, arguments=json.dumps(arguments))


UNUSED = References()
TASK = user("Make the tests pass.")

# -- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.31")
def test_a_result_whose_path_is_used_again_at_step_nine_was_last_referenced_there() -> None:
    idle = [call("ok", query=f"nothing {'abcdefgh'[n]}") for n in range(7)]
    found = referenced(TASK, *call("match in src/api/client.ts"), *idle, *call("fine", path="src/api/client.ts"))
    assert found[2] == References(index=17, step=9, count=1)


@pytest.mark.requirement("A0.31")
@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("see src/api/client.ts:12", "I edit src/api/client.ts now."),
        ("/repo/src/api/client.ts", "I edit src/api/client.ts now."),
        ("client.ts  server.ts", "I edit ./src/api/client.ts now."),
        ("def parse_header(raw):", "The fault is in parse_header, line one."),
        ("class TokenRefresher:", "`TokenRefresher` is where it happens."),
        ("user.session.expire", "so user.session.expire is called twice"),
        ("order A17-9 shipped", "Your order A17-9 has shipped."),
        ("commit 3f2a9bc", "Reverting 3f2a9bc."),
        ("total 1042 rows", "There are 1042 of them."),
        ("took 3.25 s", "It took 3.25 seconds."),
        ("https://ci.example.org/runs/88", "Look at https://ci.example.org/runs/88."),
        ("ada@example.org", "I wrote to ada@example.org."),
        ('name: "connection pool"', 'The "connection pool" is exhausted.'),
        ('{"status": "needs review"}', "It is in `needs review`."),
        (json.dumps({"diff": 'x\nold_name = "a"\ty'}), "I rename old_name."),
    ],
)
def test_paths_symbols_ids_numbers_and_quoted_strings_are_references(said: str, again: str) -> None:
    assert referenced(TASK, *call(said), assistant(again))[2] == References(index=3, step=2, count=1)


@pytest.mark.requirement("A0.31")
@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "src/api/client.ts"},
        {"edits": [{"file": {"name": "client.ts"}}]},
        {"pattern": "token refresh"},
        {"line": 412},
    ],
)
def test_arguments_of_later_calls_are_references(arguments: dict[str, object]) -> None:
    found = referenced(
        TASK,
        *call('src/api/client.ts line 412: "token refresh"'),
        *step("ok", tool="edit", arguments=json.dumps(arguments)),
    )
    assert found[2] == References(index=3, step=2, count=1)
    assert found[4] == UNUSED


@pytest.mark.requirement("A0.31")
def test_arguments_that_are_no_json_are_read_as_they_stand() -> None:
    broken = assistant("", ToolCall("c", "patch", '{"path": "src/api/client.ts", "te'))
    assert referenced(TASK, *call("src/api/client.ts"), broken)[2].count == 1


@pytest.mark.requirement("A0.31")
@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("the tests are running", "The tests are running, and that is fine."),
        ("Error: nothing found", "There was an Error."),
        ("exit code 1 after 10 tries", "I tried 10 times, 1 failed, 0 passed."),
        ("the 2nd attempt", "On the 2nd attempt it worked."),
        ("input/output error", "This is an input/output problem."),
        ("src/api/client.ts", "I look at src/api/server.ts and api/clients.ts."),
        ("lib/client.ts", "I look at src/client.ts."),
        ("parse_headers", "parse_header it is"),
        ('"a"', 'I say "a" to that.'),
        ("1042", "There are 10420 of them, or 104."),
    ],
)
def test_plain_words_small_numbers_and_other_identifiers_are_no_references(said: str, again: str) -> None:
    assert referenced(TASK, *call(said), assistant(again))[2] == UNUSED


@pytest.mark.requirement("A0.31")
@pytest.mark.parametrize(("number", "count"), [(0, 0), (9, 0), (10, 0), (11, 1), (12, 1)])
def test_whole_numbers_up_to_ten_are_trivial(number: int, count: int) -> None:
    assert referenced(TASK, *call(f"{number} rows"), assistant(f"There are {number}."))[2].count == count


def test_keys_of_arguments_and_of_results_are_no_identifiers_of_their_own() -> None:
    found = referenced(TASK, *call('{"file_path": "a", "line_count": 3}'), *call("ok", file_path="b", line_count=4))
    assert found[2] == UNUSED


# -- what the model knew before --------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.31")
def test_what_the_call_itself_named_is_no_evidence() -> None:
    read = call("File src/api/client.ts:\nexport function send() {}", path="src/api/client.ts")
    assert referenced(TASK, *read, assistant("Now src/api/client.ts is clear."))[2] == UNUSED
    traced = call('File "/repo/src/api/client.ts", line one', path="src/api/client.ts")
    assert referenced(TASK, *traced, assistant("See src/api/client.ts."))[2] == UNUSED
    used = call("export function sendRequest() {}", path="src/api/client.ts")
    assert referenced(TASK, *used, assistant("sendRequest in src/api/client.ts does it."))[2].count == 1


@pytest.mark.requirement("A0.31")
def test_what_the_task_or_the_system_text_named_is_no_evidence() -> None:
    listing = call("client.ts config_loader v2.14.1")
    again = assistant("client.ts uses config_loader v2.14.1.")
    assert referenced(TASK, *listing, again)[2].count == 1
    named = user("In src/client.ts, config_loader has to accept v2.14.1.")
    assert referenced(named, *listing, again)[2] == UNUSED
    rules = system("In src/client.ts, config_loader has to accept v2.14.1.")
    assert referenced(rules, TASK, *listing, again)[3] == UNUSED


def test_what_the_user_says_after_the_result_leaves_it_evidence() -> None:
    found = referenced(TASK, *call("order A17-9"), user("What about A17-9?"), assistant("A17-9 has shipped."))
    assert found[2].count == 1


# -- who is credited -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.31", "A0.47")
def test_every_message_that_uses_a_result_counts_once_and_the_newest_is_the_last() -> None:
    found = referenced(
        TASK,
        *call("src/a.py src/b.py parse_header"),
        assistant("src/a.py, src/b.py and parse_header, and src/a.py again."),
        *call("ok", path="src/a.py"),
        assistant("Nothing more."),
    )
    assert found[2] == References(index=4, step=3, count=2)


def test_what_was_said_before_a_result_is_no_use_of_it() -> None:
    assert referenced(TASK, assistant("src/a.py"), *call("src/a.py"))[3] == UNUSED


def test_parallel_results_are_credited_by_their_own_identifiers() -> None:
    one, other = ToolCall("a", "read", '{"n": 1}'), ToolCall("b", "read", '{"n": 2}')
    found = referenced(
        TASK, assistant("", one, other), result("see src/a.py", "a"), result("see src/b.py", "b"), assistant("src/b.py")
    )
    assert (found[2], found[3].count) == (UNUSED, 1)


def test_a_use_counts_for_the_newest_results_that_hold_the_identifier() -> None:
    results = [call(f"src/a.py {'abcdefghijklmnop'[n]}", query="x y") for n in range(HOLDERS + 2)]
    found = referenced(TASK, *results, assistant("src/a.py"))
    assert [found[i].count for i in sorted(found)] == [0, 0, *([1] * HOLDERS)]


def test_results_that_answer_no_call_are_tracked_too() -> None:
    found = referenced(TASK, result("src/a.py", None), assistant("src/a.py"))
    assert found == {1: References(index=2, step=1, count=1)}


def test_a_conversation_without_results_or_without_uses_has_no_references() -> None:
    assert referenced() == {}
    assert referenced(TASK, assistant("src/a.py")) == {}
    assert referenced(TASK, *call("src/a.py"))[2] == UNUSED


# -- what holds always -----------------------------------------------------------------------------------------------

TEXTS = st.lists(
    st.sampled_from(
        ["src/a.py", "lib/src/a.py", "a.py", "parse_header", "412", "7", '"two words"', "\\n", "the", '"', "`"]
    ),
    max_size=6,
).map(" ".join)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=8))
def test_references_are_deterministic_and_point_forward(rows: list[tuple[str, str, str]]) -> None:
    said = [TASK, *(m for text, path, say in rows for m in (assistant(say), *call(text, path=path)))]
    transcript = talk(*said)
    found = references_of(transcript)
    assert references_of(talk(*said)) == found
    assert set(found) == {i for i, m in enumerate(transcript.messages) if m.is_result}
    for index, one in found.items():
        assert (one.index is None) == (one.step is None) == (one.count == 0)
        if one.index is not None:
            assert one.index > index
            assert transcript.messages[one.index].role == "assistant"
            assert one.count <= sum(m.role == "assistant" for m in transcript.messages[index:])


@given(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200))
def test_no_text_breaks_the_analysis(said: str, arguments: str, again: str) -> None:
    spoken = assistant("", ToolCall("c", "f", arguments))
    assert set(referenced(TASK, spoken, result(said, "c"), assistant(again))) == {2}


def long_conversation(messages: int, characters: int) -> Transcript:
    """Steps whose results are grep-like lines and whose calls name a path out of an earlier result."""
    line = "src/part_{n}/module_{k}.py:{k}: def handler_{n}_{k}(request): return send(request, retries={k})\n"
    steps = (messages - 2) // 2
    per_result = characters // steps
    said: list[Said] = [system("Rules. " * 20), TASK]
    for n in range(steps):
        text = "".join(line.format(n=n, k=k) for k in range(per_result // 90 + 1))[:per_result]
        said += call(text, path=f"src/part_{max(0, n - 3)}/module_1.py", reason=f"I follow handler_{max(0, n - 1)}_2.")
    return talk(*said)


@pytest.mark.requirement("A0.31")
def test_a_long_conversation_is_analysed_in_linear_time() -> None:
    def calls(transcript: Transcript) -> int:
        profile = cProfile.Profile()
        profile.runcall(references_of, transcript)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined] # typeshed does not know it

    small, large = long_conversation(200, 400_000), long_conversation(800, 1_600_000)
    assert references_of(small)[5] == References(index=10, step=5, count=2)
    assert calls(large) < 5 * calls(small)


@pytest.mark.parametrize(
    "text",
    ["-" * 200_000, "\\" * 200_000, '"' * 99_999, "/" * 200_000, "a/" * 100_000, "é" * 200_000, words(50_000, "x_1")],
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    transcript = talk(TASK, *call(text), assistant("src/a.py uses x_1 and " + text[:20_000]))
    references_of(transcript)  # quadratic would take hours
