"""Of histories that are longer than any window one is read at a time."""

from typing import Any

import pytest

from proxy.errors import Busy
from proxy.wire import transcripts
from proxy.wire.codec import CHAT
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import write_value
from proxy.wire.transcripts import RequestTranscript, Transcripts
from tests.functional.harness import prose

COUNTER = Tokenizer().counter("o200k_base")
CHARACTERS = 20_000


def history(messages: int, *, words: int = 60) -> list[dict[str, Any]]:
    said = [{"role": ("user", "assistant")[n % 2], "content": prose(words, seed=n)} for n in range(messages)]
    return [{"role": "system", "content": "Be brief."}, *said, {"role": "user", "content": "Go on."}]


async def read(messages: list[dict[str, Any]], within: Transcripts | None = None, **asked: Any) -> RequestTranscript:
    request = CHAT.parse(write_value({"model": "gpt-4o", "messages": messages}))
    return await (within or Transcripts()).read(request, tenant="t", model="gpt-4o", counter=COUNTER, **asked)


@pytest.mark.requirement("S.26")
async def test_one_such_history_is_read_at_a_time_and_others_are_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transcripts, "COUNTED", CHARACTERS)
    monkeypatch.setattr(transcripts, "PATIENCE", 0.05)
    reader = Transcripts()
    async with reader._turn():
        with pytest.raises(Busy) as busy:
            await read(history(400), reader)
        assert (busy.value.status, busy.value.retry_after) == (503, 1)
        assert len((await read(history(20), reader)).transcript.messages) == 22
    assert len((await read(history(400), reader)).transcript.messages) == 402
