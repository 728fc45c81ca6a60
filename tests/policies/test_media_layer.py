"""Old images and files become a line of text; the newest and the protected ones stay byte for byte."""

import json
from dataclasses import replace
from typing import Any

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer
from policies.tokens import CHARS4
from proxy.wire.render import render
from tests.policies.play import strategy, window
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
        assert (
            render(draft.pieces, raws, frozenset(), roles=[m.role for m in draft.transcript.messages])[index]
            == raws[index]
        )


def test_a_message_with_parts_of_unknown_types_is_left_alone() -> None:
    odd: Said = {"role": "user", "content": [{"type": "hologram", "data": "x"}, *picture("y")["content"]]}
    messages = [user("task"), answer(), odd, answer(), *album(1)]
    transcript = read(messages)
    assert retired(retire_media(untouched(transcript), bounds(transcript, keep=0))) == [6]
