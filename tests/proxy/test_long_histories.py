"""Histories that are longer than any window: what of them is counted, what is read, and who waits meanwhile."""

import asyncio
from typing import Any

import pytest

from policies.messages import Transcript
from proxy.errors import Busy
from proxy.wire import transcripts
from proxy.wire.codec import CHAT
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import write_value
from proxy.wire.transcripts import RequestTranscript, Transcripts, skimmed
from tests.functional.harness import prose
from tests.functional.test_oversized import png

COUNTER = Tokenizer().counter("o200k_base")
CHARACTERS = 20_000


def history(messages: int, *, words: int = 60) -> list[dict[str, Any]]:
    said = [{"role": ("user", "assistant")[n % 2], "content": prose(words, seed=n)} for n in range(messages)]
    return [{"role": "system", "content": "Be brief."}, *said, {"role": "user", "content": "Go on."}]


async def read(messages: list[dict[str, Any]], within: Transcripts | None = None, **asked: Any) -> RequestTranscript:
    request = CHAT.parse(write_value({"model": "gpt-4o", "messages": messages}))
    return await (within or Transcripts()).read(request, tenant="t", model="gpt-4o", counter=COUNTER, **asked)


def tokens(found: RequestTranscript) -> list[int]:
    return [message.tokens for message in found.transcript.messages]


@pytest.mark.requirement("S.26", "R.22")
async def test_of_very_many_messages_the_oldest_are_guessed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = history(400)
    exact = tokens(await read(messages))
    monkeypatch.setattr(transcripts, "COUNTED", CHARACTERS)
    monkeypatch.setattr(transcripts, "READ_AT_ONCE", CHARACTERS // 4)
    found = await read(messages)
    guessed = tokens(found)
    assert guessed[:8] == exact[:8]
    assert guessed[-15:] == exact[-15:]
    assert guessed[8:200] != exact[8:200]
    assert sum(exact) < sum(guessed) < 1.1 * sum(exact)
    assert [m.digest for m in found.transcript.messages] == [
        m.digest for m in (await read(messages)).transcript.messages
    ]


@pytest.mark.requirement("P11")
async def test_large_images_do_not_make_texts_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = {"type": "image_url", "image_url": {"url": png(128, 118)}}
    shown = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}
    messages = [*history(30), *[shown] * 8, *history(10)[1:]]
    exact = tokens(await read(messages))
    monkeypatch.setattr(transcripts, "COUNTED", CHARACTERS)
    assert tokens(await read(messages)) == exact


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


@pytest.mark.requirement("S.26")
@pytest.mark.parametrize("sampled", [False, True])
async def test_the_event_loop_goes_on_while_a_long_history_is_read(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "SAMPLED_AT_ONCE" if sampled else "READ_AT_ONCE", 10_000)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    messages = history(400)
    found = await read(messages, may_sample=sampled)
    beside.cancel()
    assert found.sampled is sampled
    assert turns >= len(write_value(messages)) // 10_000 - 1, "a turn between two parts"


async def long_transcript(monkeypatch: pytest.MonkeyPatch, *, messages: int = 300) -> Transcript:
    monkeypatch.setattr(transcripts, "MAX_READ", 4_000)
    return (await read(history(messages))).transcript


@pytest.mark.requirement("S.26")
async def test_of_a_history_beyond_any_window_the_newest_and_what_users_said_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transcript = await long_transcript(monkeypatch)
    window = 1_000
    seen = skimmed(transcript, window=window)
    texts = [seen.read(i).text for i in range(len(seen.messages))]
    whole = [transcript.read(i).text for i in range(len(seen.messages))]
    same = [i for i, (one, other) in enumerate(zip(texts, whole, strict=True)) if one == other]
    newest = next(i for i in range(len(whole) - 1, 0, -1) if texts[i] != whole[i]) + 1
    assert set(same) == {0, 1, *range(newest, len(whole))}
    assert sum(m.tokens for m in transcript.messages[newest:]) > 1.4 * window
    for index in range(2, newest):
        if transcript.messages[index].role == "user":
            start, end = texts[index].split("\n")
            assert whole[index].startswith(start)
            assert whole[index].endswith(end)
            assert len(start) == len(end) > 0
        else:
            assert texts[index] == ""
    assert seen.messages is transcript.messages


@pytest.mark.requirement("S.26")
async def test_what_fits_twice_into_the_window_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    transcript = await long_transcript(monkeypatch)
    assert skimmed(transcript, window=transcript.tokens // 2 + 1) is transcript
