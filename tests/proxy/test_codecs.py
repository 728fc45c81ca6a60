"""How histories of ``/v1/responses`` and ``/v1/messages`` are read, and written again."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import ClientRequest, Codec
from proxy.wire.raw import split_array
from proxy.wire.render import rewritten
from proxy.wire.responses import RESPONSES
from proxy.wire.transcripts import Transcripts
from tests import legal_histories
from tests.captures import Capture, everything, sample
from tests.forwarding import MESSAGES as AT_MESSAGES
from tests.forwarding import RESPONSES as AT_RESPONSES
from tests.forwarding import TOKENIZER
from tests.profile import tried

COUNTER = TOKENIZER.counter("o200k_base")


def captures() -> list[Capture]:
    managed = (AT_RESPONSES, AT_MESSAGES)
    return [each for each in (*sample(), *everything()) if each.path.partition("?")[0] in managed]


def codec_for(body: Mapping[str, Any]) -> Codec:
    return RESPONSES if "input" in body else MESSAGES


def parsed(body: Mapping[str, Any], **spelling: Any) -> ClientRequest:
    return codec_for(body).parse(json.dumps(body, ensure_ascii=False, **spelling).encode("utf-8", "surrogatepass"))


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
async def test_a_history_is_the_same_whether_it_is_read_bit_by_bit_or_at_once(write: Any) -> None:
    for seed in range(tried(4, 200)):
        kept = Transcripts()
        for body in write(seed, events=12):
            codec = codec_for(json.loads(body))
            grown = await read(kept, codec.parse(body))
            fresh = await read(Transcripts(), codec.parse(body))
            assert (grown.messages, grown.chain, grown.head) == (fresh.messages, fresh.chain, fresh.head), seed


# -- what planning sees ----------------------------------------------------------------------------------------------


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "read", "arguments": arguments, **more}


def output(name: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": text, **more}


def thought(name: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": name, "summary": [], "encrypted_content": "gAAA"}


# -- what is written in place of it ----------------------------------------------------------------------------------


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
