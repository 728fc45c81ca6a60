"""Old images and files become a line of text; the newest and the protected ones stay byte for byte."""

import json
from dataclasses import replace
from typing import Any

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, ExtractShape, Layer
from policies.tokens import CHARS4
from proxy.wire.counting import count_message
from proxy.wire.render import render
from tests.policies.play import decide, strategy, window
from tests.policies.test_reasoning_layer import read, sent, user

retire_media = strategy("media")

Said = dict[str, Any]
PNG = "data:image/png;base64," + "iVBORw0KGgo" * 400


def picture(text: str, url: str = PNG) -> Said:
    return {
        "role": "user",
        "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}],
    }


def answer(text: str = "I see.") -> Said:
    return {"role": "assistant", "content": text}


def album(count: int) -> list[Said]:
    """A task in words, ``count`` messages with a picture each, and a question about nothing in particular."""
    shown = [m for n in range(count) for m in (picture(f"picture {n}"), answer())]
    return [user("describe what I show you"), answer("Please do."), *shown, user("thanks")]


def bounds(transcript: Transcript, *, aim: int = 0, **params: int) -> Bounds:
    found = bounds_for(
        transcript, settings=ContextSettings(), budget=window(100_000), known=ConversationState(), counter=CHARS4
    )
    return replace(found, layer=Layer(strategy="media", params=params), aim=aim)


def retired(draft: Draft) -> list[int]:
    return [p.index for p in draft.pieces if p.kind is EditKind.MEDIA and p.index is not None]


@pytest.mark.requirement("A2.23")
def test_all_but_the_newest_picture_leave_a_line_that_names_them_and_their_ref() -> None:
    messages = album(4)
    transcript = read(messages)
    draft = retire_media(untouched(transcript), bounds(transcript))
    assert retired(draft) == [2, 4, 6]
    array = sent(draft, messages)
    line = f"[weir: image image/png left out; archived as {transcript.messages[2].ref}]"
    assert array[2]["content"] == [{"type": "text", "text": "picture 0"}, {"type": "text", "text": line}]
    raws = [json.dumps(m, indent=1).encode() for m in messages]
    for index in set(range(len(messages))) - {2, 4, 6}:
        assert render(draft.pieces, raws, frozenset())[index] == raws[index]


@pytest.mark.parametrize(("keep", "gone"), [(0, [2, 4, 6]), (1, [2, 4]), (2, [2]), (3, [])])
def test_the_newest_to_keep_are_a_parameter(keep: int, gone: list[int]) -> None:
    transcript = read(album(3))
    assert retired(retire_media(untouched(transcript), bounds(transcript, keep=keep))) == gone


def test_the_oldest_go_first_and_no_more_than_it_takes() -> None:
    transcript = read(album(4))
    before = untouched(transcript)
    assert retired(retire_media(before, bounds(transcript, aim=before.tokens))) == []
    assert retired(retire_media(before, bounds(transcript, aim=before.tokens - 1))) == [2]


def test_what_is_counted_afterwards_is_what_counting_the_sent_messages_gives() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "UklGR" * 9_000, "format": "wav"}}
    file = {"type": "file", "file": {"filename": "report [final].pdf", "file_data": "JVBERi0" * 9_000}}
    link = {"type": "image_url", "image_url": {"url": "https://example.org/a.png?signature=long"}}
    mixed: Said = {"role": "user", "name": "ann", "content": [link, {"type": "text", "text": "all of it"}, audio, file]}
    messages = [user("task"), mixed, answer(), *album(2)]
    transcript = read(messages)
    draft = retire_media(untouched(transcript), bounds(transcript))
    array = sent(draft, messages)
    texts = [p["text"] for p in array[1]["content"]]
    ref = transcript.messages[1].ref
    assert texts == [
        f"[weir: image https://example.org/a.png left out; archived as {ref}]",
        "all of it",
        f"[weir: audio wav left out; archived as {ref}]",
        f"[weir: file report (final).pdf left out; archived as {ref}]",
    ]
    assert [p.tokens for p in draft.pieces] == [count_message(m, CHARS4, model="sim") for m in array]


def test_the_task_the_newest_question_and_what_is_pinned_keep_their_pictures() -> None:
    pinned = {**picture("this one"), "weir": {"keep": True}}
    messages = [picture("task"), answer(), pinned, answer(), picture("old"), answer(), picture("now")]
    transcript = read(messages)
    assert retired(retire_media(untouched(transcript), bounds(transcript))) == [4]


def test_a_message_with_parts_of_unknown_types_is_left_alone() -> None:
    odd: Said = {"role": "user", "content": [{"type": "hologram", "data": "x"}, *picture("y")["content"]]}
    messages = [user("task"), answer(), odd, answer(), *album(1)]
    transcript = read(messages)
    assert retired(retire_media(untouched(transcript), bounds(transcript, keep=0))) == [6]


@pytest.mark.requirement("A2.23")
def test_pictures_go_in_a_batch_only_and_a_second_run_changes_nothing() -> None:
    shape = ExtractShape(window=None, trigger=0.9, low_water=0.3, extract=0.1, tail=0.2)
    settings = ContextSettings(layers=(Layer(strategy="media"),), shapes=(shape,), margin=0.0)
    transcript = read(album(8))
    room = transcript.tokens
    quiet = decide(transcript, budget=window(room * 2), settings=settings)
    assert quiet.pieces is None
    full = decide(transcript, budget=window(room), settings=settings)
    assert full.applied["media"] >= 5
    draft = retire_media(untouched(transcript), bounds(transcript))
    assert retire_media(draft, bounds(transcript)) is draft
