import json

import pytest

from proxy.store.packing import Damaged, pack_message, pack_text, unpack_message, unpack_text

TEXT = 'line one\nline "two"\t\\ é 漢 😀 ' * 40


@pytest.mark.parametrize("text", ["", "plain", TEXT, "a lone \ud800 surrogate", "nul \0"])
def test_a_text_is_given_back(text: str) -> None:
    assert unpack_text(pack_text(text)) == text


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", ["", TEXT, "twice twice", "not in the message"])
def test_a_message_is_given_back_byte_for_byte(text: str, *, ascii_only: bool) -> None:
    said = "" if text == "not in the message" else text
    body = json.dumps({"role": "tool", "content": said, "name": text[:5]}, ensure_ascii=ascii_only).encode()
    assert unpack_message(pack_message(body, text)) == (body, text)


def test_a_text_that_stands_in_its_message_takes_no_room_of_its_own() -> None:
    body = json.dumps({"role": "tool", "content": TEXT}, ensure_ascii=False).encode()
    assert len(pack_message(body, TEXT)) <= len(pack_text(TEXT)) + 60


@pytest.mark.requirement("R.67")
def test_what_is_broken_is_said_to_be() -> None:
    packed = pack_text(TEXT)
    for broken in (b"", b"x", packed[:-3], packed[: len(packed) // 2], b"\0" * 100):
        with pytest.raises(Damaged):
            unpack_text(broken)
