"""A transcript is the same whether it was read cold or out of the caches, whatever came before."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.messages import Transcript
from proxy.errors import ProxyError
from proxy.wire import transcripts as module
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT, ClientRequest, Codec, parse_chat
from proxy.wire.counting import Tokenizer
from proxy.wire.responses import RESPONSES
from proxy.wire.transcripts import Transcripts
from tests.profile import tried

COUNTER = Tokenizer().counter("chars4")


async def read(transcripts: Transcripts, messages: list[Any], *, tenant: str = "t", **style: Any) -> Transcript:
    body = json.dumps({"model": "m", "messages": messages}, **style).encode()
    request = parse_chat(body)
    return (await transcripts.read(request, tenant=tenant, model="m", counter=COUNTER)).transcript


def facts(transcript: Transcript) -> tuple[Any, ...]:
    bodies = [transcript.read(i) for i in range(len(transcript.messages))]
    return transcript.messages, transcript.chain, transcript.head, bodies


message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "odd"]),
        "content": st.sampled_from(["a", "b" * 700, "c" * 5000, None]),
    },
    optional={"weir": st.just({"keep": True})},
)


def history(number: int) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{number}.{i} {'b' * 400}"} for i in range(21)]


@pytest.mark.requirement("P8")
async def test_what_is_remembered_of_many_histories_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 100)
    monkeypatch.setattr(module, "MAX_SEEN", 50)
    transcripts = Transcripts()
    first = facts(await read(transcripts, history(0)))
    for number in range(1, 12):
        await read(transcripts, history(number))
    remembered = [alike[0].messages for alike in transcripts._arrays.values()]
    assert 60 <= sum(map(len, remembered)) <= 100
    assert 30 <= len(transcripts._seen) <= 50
    assert facts(await read(transcripts, history(0))) == first


@pytest.mark.requirement("P8")
@settings(max_examples=tried(20, 60), deadline=None)
@given(
    st.lists(message, max_size=14), st.lists(st.tuples(st.integers(0, 14), st.lists(message, max_size=4)), max_size=6)
)
async def test_caches_change_nothing(start: list[Any], turns: list[tuple[int, list[Any]]]) -> None:
    warm = Transcripts()
    messages = start
    for keep, more in [(len(start), []), *turns]:
        messages = messages[:keep] + more
        style = {"indent": 1} if keep % 5 == 4 else {}
        assert facts(await read(warm, messages, **style)) == facts(await read(Transcripts(), messages))


def told(parse: Callable[[bytes], ClientRequest], body: bytes) -> Any:
    """All that is read of a body, or what is said of it."""
    try:
        request = parse(body)
    except ProxyError as error:
        return type(error), error.message
    fields = {name: bytes(raw) for name, raw in request.fields.items()}
    messages = request.messages
    mentioned = None if messages is None else [messages.mentions(word) for word in request.codec.words]
    segments = None if messages is None else [(type(raw), bytes(raw)) for raw in messages]
    return list(fields.items()), request.model, request.stream, request.max_tokens, segments, mentioned, request.body


ENDS = (
    b"]}",
    b"],%b:[]}",
    b'],"%b":[1]}',
    b'],"other":{"%b":[2]}}',
    b'], "max_tokens":7,"model":"n"}',
    b',{"role":"user","content":"more"}]}',
    b' , {"role":"user","content":"weir:1:x"} ] }',
    b',{"type":"compaction"},{"id":"a"},{"type":"reasoning"}]}',
    b",]}",
    b",null]}",
    b",NaN]}",
    b"5]}",
    b"]",
    b"}}",
    b'],"a":"\xff"}',
)


@pytest.mark.requirement("P8")
@pytest.mark.parametrize("codec", [CHAT, RESPONSES, MESSAGES], ids=lambda codec: codec.name)
@settings(max_examples=tried(20, 40), deadline=None)
@given(
    st.sampled_from([b'"model":"m",', b'"odd":[{"%b":[1]}],', b'"%b":[3],', b"", b'"model":5,']),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(ENDS)), min_size=2, max_size=8),
)
def test_a_body_that_begins_as_another_did_is_read_as_if_it_were_the_first(
    codec: Codec, opening: bytes, bodies: list[tuple[int, bytes]]
) -> None:
    """Whatever follows, and whatever stands before."""
    warm, name = Transcripts(), codec.array.encode()
    message = b'{"role":"user","content":"' + b"x" * 3_000 + b'"}'
    for count, end in bodies:
        start = b"{" + opening.replace(b"%b", name) + b'"' + name + b'":[' + b",".join([message] * count)
        for whole in (start + b"]}", start + end.replace(b"%b", name)):
            assert told(lambda body: warm.parse(codec, body, tenant="t"), whole) == told(codec.parse, whole)


@pytest.mark.requirement("S.4", "R.26")
async def test_two_tenants_share_no_chain() -> None:
    transcripts = Transcripts()
    messages = [{"role": "user", "content": "x" * 9000}, {"role": "assistant", "content": "y"}]
    one = await read(transcripts, messages, tenant="one")
    two = await read(transcripts, messages, tenant="two")
    assert one.messages == two.messages
    assert not set(one.chain) & set(two.chain)
