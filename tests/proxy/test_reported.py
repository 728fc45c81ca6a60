"""What a relayed answer used, wherever its bytes are cut."""

import pytest

from proxy.tap import Reported, ReportedUsage

PLAIN = [(b"content-type", b"application/json")]
CHAT = b'{"choices":[],"usage": null} {"usage" : {"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
RESPONSES = b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":2},"output_tokens":1}}'
MESSAGES = (
    b'data: {"message":{"usage":{"input_tokens":1,"cache_read_input_tokens":7,"cache_creation":{"a":{}},'
    b'"cache_creation_input_tokens":2,"output_tokens":1}}}\n\ndata: {"usage":{"output_tokens":30}}\n\n'
)
SAID = [
    (CHAT, ReportedUsage(prompt=10, completion=5, cached=4)),
    (RESPONSES, ReportedUsage(prompt=9, completion=1, cached=2)),
    (MESSAGES.replace(b'{"a":{}}', b'{"a":1}'), ReportedUsage(prompt=10, completion=30, cached=7, written=2)),
    # litellm's prompt_tokens hold what the cache gave, although it is said beside them as Anthropic does
    (
        b'{"usage":{"prompt_tokens":10,"completion_tokens":1,"cache_read_input_tokens":7,"cache_creation_input_tokens":2}}',
        ReportedUsage(prompt=10, completion=1, cached=7, written=2),
    ),
    (b'{"text":"\\"usage\\": {\\"prompt_tokens\\": 5}"}', None),
    (b'{"usage":{"prompt_tokens":true,"completion_tokens":-1,"input_tokens":"9"}}', None),
    (b'{"usage":' * 2_000, None),
    (b'"usage":{' + b"{" * 9_000, None),
    (b'"usage":{"a":"' + b"x" * 9_000 + b'"},"usage":{"prompt_tokens":3}', ReportedUsage(prompt=3)),
]


@pytest.mark.requirement("P15", "R.36")
@pytest.mark.parametrize(("body", "usage"), SAID)
def test_usage_is_read_wherever_the_answer_is_cut(body: bytes, usage: ReportedUsage | None) -> None:
    for size in (1, 2, 3, 7, 64, len(body)):
        reader = Reported(PLAIN)
        for at in range(0, len(body), size):
            reader.feed(body[at : at + size])
        assert reader.usage == usage, size


def test_what_is_neither_json_nor_a_stream_of_events_is_not_read() -> None:
    for headers in ([], [(b"content-type", b"audio/mpeg")], [*PLAIN, (b"content-encoding", b"br")]):
        reader = Reported(headers)
        reader.feed(CHAT)
        assert reader.usage is None
