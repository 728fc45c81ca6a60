"""Server-sent events: any chunking of the same bytes gives the same events, and the tap reads what matters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stub import events
from proxy.tap import StreamTap, read_completion
from proxy.wire import CODECS
from proxy.wire.raw import Decoder, ServerSentEvent

STREAM = (
    ": keep-alive\r\n\r\n"
    'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    "event: note\ndata: one\ndata:two\n\n"
    'data: {"choices":[{"delta":{"content":"caf\u00e9 \u2028 \U0001f600"}}]}\r\n\r\n'
    'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}\r\r'
    "data: [DONE]\n\n"
).encode()


def events_of(chunks: list[bytes]) -> list[ServerSentEvent]:
    decoder = Decoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@pytest.mark.requirement("R.36", "R.37", "R.38")
@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_chunking_gives_the_same_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert b"".join(chunks) == STREAM
    assert events_of(chunks) == events_of([STREAM])


@pytest.mark.requirement("R.36", "R.38")
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b'event: error\ndata: {"error":{"message":"late"}}\n\n'])
def test_the_tap_sees_the_same_in_whole_events_as_in_single_bytes(path: str, end: bytes, last: bytes) -> None:
    chunks = [chunk.replace(b"\n", end) for chunk in (*events(path), last)]
    codec = CODECS[path.split("/")[1]]
    whole, cut = StreamTap(codec=codec), StreamTap(codec=codec)
    for chunk in chunks:
        whole.feed(chunk)
    for byte in b"".join(chunks):
        cut.feed(bytes([byte]))
    assert whole.seen == cut.seen
    assert whole.complete
    assert whole.seen.finish_reasons
    assert (whole.seen.error is None) is not bool(last)


@pytest.mark.requirement("R.39")
def test_an_endless_event_is_given_up_and_not_held() -> None:
    decoder = Decoder()
    for _ in range(10):
        decoder.feed(b"data: " + b"x" * 1_000_000)
    assert decoder.overrun
    assert decoder.feed(b"\n\ndata: ok\n\n")[-1].data == b"ok"


def test_the_tap_sees_usage_end_and_whether_anything_was_said() -> None:
    tap = StreamTap()
    tap.feed(STREAM[:80])
    assert not tap.seen.said
    tap.feed(STREAM[80:])
    assert tap.seen.said
    assert tap.seen.done
    assert tap.seen.usage is not None
    assert (tap.seen.usage.prompt, tap.seen.usage.completion, tap.seen.usage.cached) == (7, 2, 3)


@given(st.binary(max_size=200))
def test_no_bytes_disturb_the_tap(body: bytes) -> None:
    StreamTap().feed(body)
    read_completion(body)
