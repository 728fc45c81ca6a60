import json
from random import Random

import pytest

from proxy.store.inspections import RECORD, KeptArrays, pack_arrays, unpack_arrays
from proxy.store.packing import (
    Damaged,
    pack,
    pack_message,
    pack_text,
    unpack,
    unpack_message,
    unpack_text,
)

TEXT = 'line one\nline "two"\t\\ é 漢 😀 ' * 40


@pytest.mark.parametrize("text", ["", "plain", TEXT, "a lone \ud800 surrogate", "nul \0"])
def test_a_text_is_given_back(text: str) -> None:
    assert unpack_text(pack_text(text)) == text
    assert unpack_text(pack_text(text, like=TEXT), like=TEXT) == text


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", ["", TEXT, "twice twice", "not in the message"])
def test_a_message_is_given_back_byte_for_byte(text: str, *, ascii_only: bool) -> None:
    said = "" if text == "not in the message" else text
    body = json.dumps({"role": "tool", "content": said, "name": text[:5]}, ensure_ascii=ascii_only).encode()
    assert unpack_message(pack_message(body, text)) == (body, text)


def test_a_text_that_stands_in_its_message_takes_no_room_of_its_own() -> None:
    body = json.dumps({"role": "tool", "content": TEXT}, ensure_ascii=False).encode()
    assert len(pack(pack_message(body, TEXT))) <= len(pack_text(TEXT)) + 60


@pytest.mark.requirement("R.67")
def test_what_is_broken_is_said_to_be() -> None:
    packed = pack_text(TEXT)
    for broken in (b"", b"x", packed[:-3], packed[: len(packed) // 2], b"\0" * 100):
        with pytest.raises(Damaged):
            unpack_text(broken)
    with pytest.raises(Damaged):
        unpack(pack_text("no such thing"), dict[str, bytes])


def arrays(number: int, *messages: int) -> KeptArrays:
    """Those of a request with these messages."""
    records = b"".join(RECORD.pack(each.to_bytes(6, "big"), each % 3, each % 9973) for each in messages)
    return KeptArrays(f"req_{number}", 1000.0 + number, b'{"keep":20}', records)


@pytest.mark.requirement("A0.148")
def test_the_arrays_of_requests_are_given_back_whatever_they_share() -> None:
    given = [
        arrays(0, *range(300)),
        arrays(1, *range(302)),
        arrays(2, *range(100), 7, *range(101, 304)),
        arrays(3, *range(2)),
        arrays(4),
        arrays(5, 1, 2, 3),
        arrays(6, 1, 2, 3),
    ]
    for count in range(1, len(given) + 1):
        assert unpack_arrays(pack_arrays(given[:count])) == given[:count]


@pytest.mark.requirement("P9", "A0.148")
def test_a_longer_conversation_takes_no_more_room_for_each_request_that_is_kept() -> None:
    random = Random(1)
    messages = [random.getrandbits(40) for _ in range(2000)]
    one, twenty = ([arrays(n, *messages[: 1960 + 2 * n]) for n in range(count)] for count in (1, 20))
    assert len(pack_arrays(twenty)) < 1.1 * len(pack_arrays(one))
