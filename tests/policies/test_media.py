import base64
import io
import json
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.tokens import image_size, is_media, part_tokens

IMAGES = json.loads((Path(__file__).parent / "images.json").read_text())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TYPES = ["image_url", "input_image", "image", "input_audio", "audio_url", "file", "document", "video", "text", 7, None]
KEYS = ["image_url", "image", "source", "url", "data", "detail", "input_audio", "format", "file", "file_data", "video"]
DATA = st.sampled_from(
    ["data:", "data:,", "data:image/png;base64,iVBORw0KGgo", "http://x/y.png", "/9j/4AAQ", "UklGRg=="]
)
MODELS = ["gpt-4o", "gpt-5-mini", "gpt-5.5", "claude-opus-4-7", "gemini-2.5-pro", "gemini-3-pro", "x", "", "a/b/c"]


def png(width: int, height: int, *, size: int = 0) -> str:
    """A data URL of a PNG of that many pixels with `size` bytes of ancillary data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = b"\x89PNG\r\n\x1a\n" + head + chunk(b"teXt", bytes(size)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(body).decode()


def image(width: int, height: int, model: str, detail: str = "high") -> int:
    part = {"type": "image_url", "image_url": {"url": png(width, height), "detail": detail}}
    return part_tokens(part, model=model)


@pytest.mark.parametrize("name", IMAGES)
def test_a_header_cut_anywhere_gives_the_size_or_nothing(name: str) -> None:
    sample = IMAGES[name]
    whole = base64.b64decode(sample["base64"])
    for stop in range(len(whole)):
        assert image_size(whole[:stop]) in (None, (sample["width"], sample["height"]))


@given(st.binary(max_size=64), st.sampled_from([b"", b"\xff\xd8", b"\xff\xd8\xff\xc0", b"RIFFxxxxWEBPVP8L", b"GIF89a"]))
def test_no_bytes_break_the_reader_of_headers(data: bytes, start: bytes) -> None:
    size = image_size(start + data)
    assert size is None or min(size) > 0


def test_a_jpeg_may_have_fill_bytes_and_markers_without_length() -> None:
    plain = base64.b64decode(IMAGES["jpeg baseline"]["base64"])
    assert image_size(plain[:2] + b"\xff\x01\xff\xff" + plain[2:]) == (90, 61)
    assert image_size(plain[:2] + b"junk" + plain[2:]) is None


def test_an_image_that_nobody_can_read_costs_what_a_typical_one_costs() -> None:
    endless = base64.b64encode(b"\xff\xd8" + b"\xff\xe1\xff\xff" + bytes(65_533) * 20).decode()
    for data in (endless, "AAAA" * 100_000, "é" * 5_000, "data:image/svg+xml;utf8,<svg/>"):
        assert part_tokens({"type": "image", "source": {"data": data}}, model="gpt-4o") == 1105
    assert part_tokens({"type": "image_url", "image_url": {"url": "https://x/y"}}, model="gemini-2.5-pro") == 1120


@pytest.mark.parametrize(
    ("width", "height", "model", "tokens"),
    [
        (1024, 1024, "gpt-4o", 765),
        (2048, 4096, "gpt-4o", 1105),
        (1024, 1024, "openai/gpt-4.1", 765),
        (1024, 1024, "gpt-4-turbo", 765),
        (100, 100, "gpt-4o", 255),
        (1024, 1024, "gpt-4o-mini", 2833 + 4 * 5667),
        (1024, 1024, "gpt-5", 70 + 4 * 140),
        (1024, 1024, "gpt-5-chat-latest", 70 + 4 * 140),
        (1024, 1024, "gpt-5.1", 70 + 4 * 140),
        (1024, 1024, "o1", 75 + 4 * 150),
        (1024, 1024, "o3-2025-04-16", 75 + 4 * 150),
        (1024, 1024, "computer-use-preview", 65 + 4 * 129),
        (1800, 2400, "gpt-5.2", 1452),
        (1800, 2400, "gpt-5.1-codex", 1452),
        (1024, 1024, "gpt-5.2", 1024),
        (1024, 1024, "gpt-5-mini", 1659),
        (1024, 1024, "gpt-4.1-nano", 2520),
        (1024, 1024, "o4-mini", 1762),
        (1024, 1024, "gpt-5.4-mini", 1659),
        (1800, 2400, "gpt-5.4", 43 * 57),
        (1920, 1080, "claude-sonnet-4-5", 1560),
        (1920, 1080, "anthropic/claude-3-5-sonnet-20241022", 1560),
        (1920, 1080, "claude-opus-4-7", 69 * 39),
        (28, 28, "claude-sonnet-4-20250514", 1),
        (8000, 8000, "claude-sonnet-4", 39 * 39),
        (384, 384, "gemini-2.5-pro", 258),
        (1024, 1024, "gemini-2.0-flash", 4 * 258),
        (4000, 4000, "gemini-1.5-pro", 258),
        (4000, 4000, "gemini-3-pro", 1120),
        (750, 1000, "llava", 1000),
        (10, 10, "llava", 85),
        (20000, 20000, "llava", 4784),
    ],
)
def test_an_image_costs_what_its_provider_says(width: int, height: int, model: str, tokens: int) -> None:
    assert image(width, height, model) == tokens


def test_audio_costs_ten_tokens_a_second() -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(44_100)
        sound.writeframes(bytes(44_100 * 4 * 30))
    data = base64.b64encode(out.getvalue()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    assert part_tokens(part, model="gpt-4o-audio-preview") == pytest.approx(300, abs=1)
    assert part_tokens(part, model="gemini-2.5-pro") == pytest.approx(960, abs=1)


def test_a_text_file_costs_by_its_characters() -> None:
    url = "data:text/plain;base64," + base64.b64encode(b"a" * 9_000).decode()
    assert part_tokens({"type": "file", "file": {"file_data": url}}, model="gpt-4o") == 3_600


@given(st.dictionaries(st.sampled_from(KEYS), JSON | DATA | st.fixed_dictionaries({"url": DATA, "data": JSON})), JSON)
def test_no_part_breaks_the_count(part: dict[str, Any], detail: Any) -> None:
    for kind in TYPES:
        for model in MODELS:
            assert part_tokens({**part, "type": kind, "detail": detail}, model=model) >= 0
    assert is_media({**part, "type": detail}) in (True, False)
