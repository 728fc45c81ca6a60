"""How histories of ``/v1/responses`` and ``/v1/messages`` are read, and written again."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from policies.ledger import EditKind
from policies.messages import units
from proxy.errors import ProxyError
from proxy.wire.anthropic import MESSAGES
from proxy.wire.chat import digest_of, message_of
from proxy.wire.codec import ClientRequest, Codec
from proxy.wire.raw import split_array
from proxy.wire.render import rewritten
from proxy.wire.responses import RESPONSES
from proxy.wire.transcripts import Transcripts
from tests import legal_histories
from tests.captures import Capture, everything, sample
from tests.forwarding import MESSAGES as AT_MESSAGES
from tests.forwarding import RESPONSES as AT_RESPONSES
from tests.forwarding import TOKENIZER, Forwarding, problems, started
from tests.profile import each_once, tried

COUNTER = TOKENIZER.counter("o200k_base")
CODECS = (RESPONSES, MESSAGES)
BOTH = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def captures() -> list[Capture]:
    managed = (AT_RESPONSES, AT_MESSAGES)
    return [each for each in (*sample(), *everything()) if each.path.partition("?")[0] in managed]


def codec_for(body: Mapping[str, Any]) -> Codec:
    return RESPONSES if "input" in body else MESSAGES


def parsed(body: Mapping[str, Any], **spelling: Any) -> ClientRequest:
    return codec_for(body).parse(json.dumps(body, ensure_ascii=False, **spelling).encode("utf-8", "surrogatepass"))


def views(codec: Codec, array: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [codec.view(raw) for raw in parsed({codec.array: array}).messages or ()]


def digests(codec: Codec, array: Sequence[Any]) -> list[bytes]:
    return [digest_of(view) for view in views(codec, array)]


def shapes(codec: Codec, array: Sequence[Any]) -> list[tuple[str, tuple[str, ...], str | None]]:
    """Role, calls and answer of each segment."""
    found = [message_of(view, 1) for view in views(codec, array)]
    return [(message.role, message.call_ids, message.answers) for message in found]


async def read(transcripts: Transcripts, request: ClientRequest) -> Any:
    return (await transcripts.read(request, tenant="t", model="gpt-5", counter=COUNTER)).transcript


# -- as it came ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P4", "P2")
def test_every_captured_history_is_written_again_as_it_came() -> None:
    for capture in captures():
        for spelling in ({}, {"indent": 1}, {"separators": (",", ":")}):
            request = parsed(capture.body, **spelling)
            if request.messages is None:
                continue
            array = rewritten(request, messages=list(request.messages), pruned=())
            field = request.codec.array
            assert json.loads(array) == capture.body, capture.name
            again = request.codec.parse(array)
            assert [bytes(each) for each in split_array(again.fields[field]) or ()] == [
                bytes(each) for each in split_array(request.fields[field]) or ()
            ], capture.name


@pytest.mark.requirement("P4", "P2")
@pytest.mark.parametrize("write", [legal_histories.responses, legal_histories.messages])
def test_every_legal_history_is_written_again_as_it_came(write: Any) -> None:
    for seed in range(tried(25, 400)):
        *_, body = write(seed)
        request = codec_for(json.loads(body)).parse(body)
        written = rewritten(request, messages=list(request.messages or ()), pruned=())
        assert json.loads(written) == json.loads(body), seed
        assert problems(json.loads(written), f"/v1{request.codec.path}") == []


@pytest.mark.requirement("P4", "P2")
@pytest.mark.parametrize("write", [legal_histories.responses, legal_histories.messages])
async def test_a_history_is_the_same_whether_it_is_read_bit_by_bit_or_at_once(write: Any) -> None:
    for seed in range(tried(4, 200)):
        kept = Transcripts()
        for body in write(seed, events=12):
            codec = codec_for(json.loads(body))
            grown = await read(kept, codec.parse(body))
            fresh = await read(Transcripts(), codec.parse(body))
            assert (grown.messages, grown.chain, grown.head) == (fresh.messages, fresh.chain, fresh.head), seed


@pytest.mark.requirement("P2")
@BOTH
async def test_what_stands_before_a_compaction_costs_nothing_once_that_has_come(codec: Codec) -> None:
    """The same bytes, read before without it."""
    if codec is RESPONSES:
        first = [user("Begin."), call("a"), output("a", "long " * 400)]
        wall = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
    else:
        first = [user("Begin."), uses("a"), results("a", text="long " * 400)]
        wall = {"role": "assistant", "content": [{"type": "compaction", "content": "All of it.", "signature": "s"}]}
    kept = Transcripts()
    before = await read(kept, parsed({codec.array: first}))
    after = await read(kept, parsed({codec.array: [*first, wall, user("Go on.")]}))
    assert before.tokens > 400
    assert after.tokens < 40
    assert {message.role for message in after.messages[: after.head]} == {"system"}
    assert after.messages[after.head].role == "user"


# -- what planning sees ----------------------------------------------------------------------------------------------


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "read", "arguments": arguments, **more}


def output(name: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": text, **more}


def thought(name: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": name, "summary": [], "encrypted_content": "gAAA"}


def uses(*names: str, **given: Any) -> dict[str, Any]:
    blocks = [{"type": "tool_use", "id": name, "name": "read", "input": given} for name in names]
    return {"role": "assistant", "content": blocks}


def results(*names: str, text: Any = "ok", behind: Sequence[Any] = ()) -> dict[str, Any]:
    return {"role": "user", "content": [*(result(name, text) for name in names), *behind]}


def result(name: str, text: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": text, **more}


ITEMS: Sequence[tuple[str, Sequence[Any], Sequence[tuple[str, tuple[str, ...], str | None]]]] = [
    (
        "a run of the model's is one message",
        [user("x"), thought("rs_1"), {"type": "message", "role": "assistant", "content": []}, call("a"), call("b")],
        [("user", (), None), ("assistant", ("a", "b"), None)],
    ),
    ("each output is one", [output("a", "1"), output("b", "2")], [("tool", (), "a"), ("tool", (), "b")]),
    ("a role without a type is a message", [{"role": "developer", "content": "x"}], [("developer", (), None)]),
    ("a reference is the model's", [{"type": "item_reference", "id": "msg_1"}], [("assistant", (), None)]),
    ("a bare id is a reference", [{"id": "rs_1"}, call("a")], [("assistant", ("a",), None)]),
    (
        "a custom tool",
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ],
        [("assistant", ("c",), None), ("tool", (), "c")],
    ),
    (
        "a local shell answers by its id",
        [
            {
                "type": "local_shell_call",
                "id": "ls_1",
                "call_id": "s",
                "action": {"type": "exec"},
                "status": "completed",
            },
            {"type": "local_shell_call_output", "id": "s", "output": "{}"},
        ],
        [("assistant", ("s",), None), ("tool", (), "s")],
    ),
    (
        "a shell",
        [
            {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a", "stderr": "b"}]},
        ],
        [("assistant", ("s",), None), ("tool", (), "s")],
    ),
    (
        "a patch",
        [
            {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file"}, "status": "completed"},
            {"type": "apply_patch_call_output", "call_id": "p", "status": "completed"},
        ],
        [("assistant", ("p",), None), ("tool", (), "p")],
    ),
    (
        "a computer",
        [
            {"type": "computer_call", "id": "cu_1", "call_id": "u", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "u",
                "output": {"type": "computer_screenshot", "image_url": "x"},
            },
        ],
        [("assistant", ("u",), None), ("tool", (), "u")],
    ),
    (
        "a search for tools",
        [
            {"type": "tool_search_call", "call_id": "t", "arguments": {"q": "x"}, "execution": "client"},
            {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "f"}]},
        ],
        [("assistant", ("t",), None), ("tool", (), "t")],
    ),
    (
        "an approval",
        [
            {"type": "mcp_approval_request", "id": "mcpr_1", "arguments": "{}", "name": "n", "server_label": "s"},
            {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
        ],
        [("assistant", ("mcpr_1",), None), ("tool", (), "mcpr_1")],
    ),
    (
        "what the provider's own tools did is the model's",
        [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "mcp_call", "id": "mcp_1", "arguments": "{}", "name": "n", "server_label": "s", "output": "o"},
            {"type": "image_generation_call", "id": "ig_1", "result": "aGk=", "status": "completed"},
        ],
        [("assistant", (), None)],
    ),
    (
        "tools that come later stay where they are",
        [{"type": "additional_tools", "role": "developer", "tools": []}, user("x")],
        [("system", (), None), ("user", (), None)],
    ),
    (
        "what the provider has summed up is nobody's",
        [user("x"), call("a"), output("a", "1"), {"type": "compaction", "encrypted_content": "g"}, user("y")],
        [*[("system", (), None)] * 4, ("user", (), None)],
    ),
]


@pytest.mark.parametrize(("array", "expected"), [each[1:] for each in ITEMS], ids=[each[0] for each in ITEMS])
def test_what_items_are(array: Any, expected: Any) -> None:
    assert shapes(RESPONSES, array) == expected


TURNS: Sequence[tuple[str, Sequence[Any], Sequence[tuple[str, tuple[str, ...], str | None]]]] = [
    (
        "each result is one message, what else is said another",
        [user("x"), uses("a", "b"), results("b", "a", behind=[{"type": "text", "text": "And?"}])],
        [("user", (), None), ("assistant", ("a", "b"), None), ("tool", (), "b"), ("tool", (), "a"), ("user", (), None)],
    ),
    (
        "assistant messages one after another are one",
        [user("x"), {"role": "assistant", "content": "I look."}, uses("a"), results("a")],
        [("user", (), None), ("assistant", ("a",), None), ("tool", (), "a")],
    ),
    (
        "a message of the system's between others",
        [user("x"), {"role": "system", "content": "Now."}, {"role": "assistant", "content": "y"}],
        [("user", (), None), ("system", (), None), ("assistant", (), None)],
    ),
    (
        "a server's tool is part of the turn",
        [
            user("x"),
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                ],
            },
        ],
        [("user", (), None), ("assistant", (), None)],
    ),
    (
        "what stands up to a compaction is nobody's",
        [user("x"), {"role": "assistant", "content": [{"type": "compaction", "content": "y"}]}, user("z")],
        [("system", (), None), ("system", (), None), ("user", (), None)],
    ),
    (
        "a text about compactions is a text",
        [user('{"type":"compaction"}'), {"role": "assistant", "content": [{"type": "text", "text": '"compaction"'}]}],
        [("user", (), None), ("assistant", (), None)],
    ),
]


@pytest.mark.parametrize(("array", "expected"), [each[1:] for each in TURNS], ids=[each[0] for each in TURNS])
def test_what_messages_are(array: Any, expected: Any) -> None:
    assert shapes(MESSAGES, array) == expected


SAME: Sequence[tuple[str, Codec, Any, Any]] = [
    ("ids", RESPONSES, [thought("rs_1"), call("a", id="fc_1")], [thought("rs_9"), call("b")]),
    ("a status", RESPONSES, [output("a", "x", status="completed")], [output("a", "x")]),
    ("reasoning that is left out", RESPONSES, [thought("rs_1"), call("a")], [call("a")]),
    ("the spelling of arguments", RESPONSES, [call("a", '{"a": 1, "b": 2}')], [call("a", '{"b":2,"a":1}')]),
    ("a text as a part", RESPONSES, [user("x")], [user([{"type": "input_text", "text": "x"}])]),
    ("an output as a part", RESPONSES, [output("a", "x")], [output("a", [{"type": "input_text", "text": "x"}])]),
    ("a type that says nothing", RESPONSES, [user("x")], [{"type": "message", **user("x")}]),
    (
        "what an answer says of itself",
        RESPONSES,
        [{"role": "assistant", "content": "x"}],
        [
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "phase": "final_answer",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
            }
        ],
    ),
    (
        "a mark that Codex hands on",
        RESPONSES,
        [user("x")],
        [{**user("x"), "internal_chat_message_metadata_passthrough": {"a": 1}}],
    ),
    ("a call that a program made", RESPONSES, [call("a")], [call("a", caller={"type": "direct"})]),
    (
        "a breakpoint",
        RESPONSES,
        [user([{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}])],
        [user("x")],
    ),
    ("ids of calls", MESSAGES, [uses("a", q=1), results("a")], [uses("z", q=1), results("z")]),
    ("a text as a block", MESSAGES, [user("x")], [user([{"type": "text", "text": "x"}])]),
    (
        "a marker",
        MESSAGES,
        [user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])],
        [user("x")],
    ),
    (
        "a marker on a result",
        MESSAGES,
        [uses("a"), user([result("a", cache_control={"type": "ephemeral"})])],
        [uses("a"), results("a")],
    ),
    ("a result that did not fail", MESSAGES, [uses("a"), user([result("a", is_error=False)])], [uses("a"), results("a")]),
    ("a result as a block", MESSAGES, [uses("a"), results("a", text=[{"type": "text", "text": "ok"}])], [uses("a"), results("a")]),
    (
        "thinking that is left out",
        MESSAGES,
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, *uses("a")["content"]]}],
        [uses("a")],
    ),
    ("the order of keys", MESSAGES, [uses("a", p=1, q=2)], [uses("a", q=2, p=1)]),
    ("an answer in one block", MESSAGES, [{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]),
]  # fmt: skip


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(("codec", "one", "other"), [each[1:] for each in SAME], ids=[each[0] for each in SAME])
def test_what_clients_change_makes_no_other_history(codec: Codec, one: Any, other: Any) -> None:
    assert digests(codec, one) == digests(codec, other)


# -- what is written in place of it ----------------------------------------------------------------------------------


@each_once
@pytest.mark.requirement("P3")
@pytest.mark.parametrize(
    ("write", "path"), [(legal_histories.responses, AT_RESPONSES), (legal_histories.messages, AT_MESSAGES)]
)
@pytest.mark.parametrize("kind", [EditKind.EVICT, EditKind.MEDIA, EditKind.UNBOUND])
def test_a_history_stays_legal_with_every_segment_edited(write: Any, path: str, kind: EditKind) -> None:
    text = "" if kind is EditKind.UNBOUND else "[gone]"
    for seed in range(tried(5, 200)):
        *_, body = write(seed, fields={} if path == AT_RESPONSES else {"thinking": {"type": "adaptive"}})
        codec = codec_for(json.loads(body))
        segments = codec.parse(body).messages or ()
        for place, raw in enumerate(segments):
            view = codec.view(raw)
            if view.get("role") in ("system", "developer") or not view:
                continue
            changed = [*segments[:place], codec.edited(raw, kind, text), *segments[place + 1 :]]
            written = rewritten(codec.parse(body), messages=changed, pruned=())
            assert problems(json.loads(written), path) == [], (seed, place, view)


@pytest.mark.requirement("P3")
@BOTH
def test_a_history_stays_legal_without_any_one_of_its_units(codec: Codec) -> None:
    write, path = (
        (legal_histories.responses, AT_RESPONSES) if codec is RESPONSES else (legal_histories.messages, AT_MESSAGES)
    )
    for seed in range(tried(5, 200)):
        *_, body = write(seed)
        segments = list(codec.parse(body).messages or ())
        seen = [message_of(codec.view(raw), 1) for raw in segments]
        for unit in units(seen)[:-1]:
            if all(seen[index].is_head for index in unit.indices):
                continue
            kept = [raw for index, raw in enumerate(segments) if index not in unit.indices or seen[index].is_head]
            if kept:
                written = json.loads(rewritten(codec.parse(body), messages=kept, pruned=()))
                assert problems(written, path) == [], (seed, unit)


@pytest.mark.requirement("P3")
def test_calls_go_without_the_ids_of_reasoning_that_has_gone() -> None:
    """Parallel calls may have their outputs between them; all were made with the first one's reasoning."""
    array = [
        user("x"),
        *(thought("rs_1"), call("a", id="fc_1"), output("a", "1")),
        *(call("b", '{"p" : 1}', id="fc_2"), output("b", "2")),
        *(call("c"), output("c", "3")),
        *(call("d", id="fc_4"), output("d", "4")),
    ]
    request = parsed({"input": array})
    whole = list(request.messages or ())
    assert json.loads(rewritten(request, messages=whole, pruned=()))["input"] == array
    for gone in ((1, 2), (1, 2, 3, 4)):
        kept = [raw for place, raw in enumerate(whole) if place not in gone]
        written = json.loads(rewritten(request, messages=kept, pruned=()))["input"]
        bare = [{k: v for k, v in item.items() if k != "id"} for item in array]
        assert written == [array[0], *bare[len(gone) + 2 :]]
    other = [user("y"), thought("rs_2"), call("e", id="fc_5"), output("e", "5")]
    request = parsed({"input": [*array, *other]})
    kept = [raw for place, raw in enumerate(request.messages or ()) if place not in (1, 2)]
    written = json.loads(rewritten(request, messages=kept, pruned=()))["input"]
    assert written[-4:] == other
    assert "id" not in written[1]


@pytest.mark.requirement("P3")
async def test_a_loop_with_ids_whose_reasoning_is_its_first_step_is_no_single_block() -> None:
    """A model need not reason before every call; no more than the newest step is to be kept as it is."""
    steps = [item for n in range(20) for item in (call(f"c{n}", id=f"fc_{n}"), output(f"c{n}", "word " * 50))]
    transcript = await read(Transcripts(), parsed({"input": [user("x"), thought("rs_1"), *steps]}))
    assert len(units(transcript.messages)) == 21


# -- what nobody should send -----------------------------------------------------------------------------------------

DEEP: Any = "x"
for _ in range(90):
    DEEP = [DEEP]
ODD: Sequence[tuple[str, Any]] = [
    ("nothing", []),
    ("no objects", [None, 1, "x", True, [], 1.5]),
    ("no content", [{"role": "user"}, {"role": "user", "content": None}, {"role": "assistant", "content": None}]),
    ("content that is a number", [{"role": "user", "content": 7}, {"role": "assistant", "content": {"a": 1}}]),
    ("parts that are none", [{"role": "user", "content": [None, 1, "x", {}, {"type": None}, {"type": 7}]}]),
    ("texts that are none", [{"role": "user", "content": [{"type": "text", "text": None}, {"type": "input_text"}]}]),
    ("an unknown role", [{"role": "wizard", "content": "x"}, {"role": 5, "content": "x"}, {"role": None}]),
    ("an unknown type", [{"type": "hologram", "id": "h_1", "beam": [1]}, {"type": 5}, {"type": None, "id": None}]),
    ("numbers as ids", [{"type": "function_call", "id": 5, "call_id": 6, "name": 7, "arguments": 8}]),
    ("an output of nothing", [{"type": "function_call_output"}, {"type": "function_call_output", "call_id": None, "output": None}]),
    ("odd outputs", [output("a", 5), output("b", {"x": 1}), output("c", [None, 5, {"type": "input_text"}]), output("d", [[1]])]),
    ("odd reasoning", [{"type": "reasoning", "id": None, "summary": None, "content": 5, "encrypted_content": {"a": 1}}, call("a")]),
    ("odd calls", [{"role": "assistant", "content": [{"type": "tool_use"}, {"type": "tool_use", "id": 5, "input": None}]}]),
    ("odd results", [{"role": "user", "content": [{"type": "tool_result"}, {"type": "tool_result", "tool_use_id": 5, "content": 7}]}]),
    ("odd results inside", [{"role": "user", "content": [result("a", [None, 5, {"type": "image"}])]}, results("a", "a")]),
    ("odd thinking", [{"role": "assistant", "content": [{"type": "thinking"}, {"type": "redacted_thinking", "data": 5}]}]),
    ("odd compactions", [{"type": "compaction"}, {"role": "assistant", "content": [{"type": "compaction", "content": 5}]}]),
    ("odd marks", [{"role": "user", "content": "x", "weir": 5}, {"role": "user", "content": [{"type": "text", "text": "x", "weir": {"keep": 7}}]}]),
    ("odd markers", [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": 5}]}, {"role": "user", "content": "y", "cache_control": {}}]),
    ("only a model's", [{"role": "assistant", "content": "x"}, call("a")]),
    ("only the system's", [{"role": "system", "content": "x"}, {"role": "developer", "content": "y"}]),
    ("a lone surrogate", [{"role": "user", "content": "\ud800 half"}, output("a", "\udfff")]),
    ("deep", [{"role": "user", "content": [{"type": "text", "text": "x", "more": DEEP}]}, output("a", DEEP)]),
    ("empty", [{}, {"content": []}, {"role": "user", "content": []}, {"role": "user", "content": ""}]),
    ("keys that are odd", [{"role": "user", "content": "x", "": 1, "\u2028": {"\ud83d": 2}}]),
]  # fmt: skip


def odd_bodies(array: Sequence[Any]) -> list[tuple[str, bytes]]:
    """The array alone, and behind a history that has to be made smaller, on each endpoint."""
    long = [
        user("Begin."),
        call("q"),
        output("q", "word " * 900),
        *([{"role": "assistant", "content": "ok"}, user("more")] * 2),
    ]
    turns = [
        user("Begin."),
        uses("q"),
        results("q", text="word " * 900),
        *([{"role": "assistant", "content": "ok"}, user("more")] * 2),
    ]
    made = []
    for path, name, before in ((AT_RESPONSES, "input", long), (AT_MESSAGES, "messages", turns)):
        for whole in (array, [*before, *array], [*array, *before], [*before, *array, user("Go on.")]):
            made.append(
                (path, json.dumps({"model": "m", "max_tokens": 16, "max_output_tokens": 16, name: whole}).encode())
            )
    return made


@pytest.mark.requirement("P6", "P11")
async def test_odd_requests_are_the_upstreams_to_judge() -> None:
    """Each goes up, whatever stands in it, in room or without; what cannot fit is told so."""
    async with started(700) as runtime:
        for name, array in ODD:
            for number, (path, body) in enumerate(odd_bodies(array)):
                forwarding = Forwarding(runtime, key=f"{name} {number}", path=path)
                sent = await forwarding.send(body)
                assert forwarding.degraded == [], (name, number)
                if sent is not None:
                    assert isinstance(json.loads(sent.body), dict)


@pytest.mark.requirement("P6", "P11")
@pytest.mark.parametrize("path", [AT_RESPONSES, AT_MESSAGES])
async def test_what_is_no_array_goes_up_as_it_came(path: str) -> None:
    async with started(700) as runtime:
        for value in ('"x"', "null", "5", "{}", "true", '{"role":"user"}'):
            name = "input" if path == AT_RESPONSES else "messages"
            body = f'{{"model": "m", "{name}": {value}}}'.encode()
            sent = await Forwarding(runtime, key=value[:9], path=path).send(body)
            assert sent is not None
            assert sent.body == body


@pytest.mark.requirement("P6", "P11")
@pytest.mark.parametrize("path", [AT_RESPONSES, AT_MESSAGES])
async def test_very_many_messages_are_managed_and_too_deep_ones_told_so(path: str) -> None:
    count = 10_000
    turns = [
        user(f"step {n}") if n % 2 == 0 else {"role": "assistant", "content": f"done {n}"} for n in range(count + 1)
    ]
    name = "input" if path == AT_RESPONSES else "messages"
    async with started(8_000) as runtime:
        sent = await Forwarding(runtime, path=path).send(
            json.dumps({"model": "m", "max_tokens": 100, name: turns}).encode()
        )
        assert sent is not None
        assert len(sent.value[name]) < count
        assert (
            problems(
                {**sent.value, "max_tokens": 100} if path == AT_MESSAGES else {"model": "m", name: sent.value[name]},
                path,
            )
            == []
        )
        deep = f'{{"model":"m","{name}":[{{"role":"user","content":{"[" * 3000}{"]" * 3000}}}]}}'
        with pytest.raises(ProxyError, match="nested"):
            await Forwarding(runtime, path=path).send(deep.encode())
