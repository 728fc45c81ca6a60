import asyncio
import hashlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import tiktoken
import zstandard

import proxy.wire.counting
from policies.tokens import CHARS2_5
from proxy.wire.counting import (
    Tokenizer,
    Vocabulary,
    encoding_name,
    installed_estimators,
    pieces,
    vocabulary_directories,
)

ENCODINGS = ("o200k_base", "cl100k_base")
FILES = {
    name: hashlib.sha1(f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken".encode()).hexdigest()
    for name in ENCODINGS
}
SAMPLES = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock.\r\n\tdef f(x):\n        return x  \n\n",
    "<|endoftext|><|im_start|>user<|endofprompt|>",
    "naïve café 你好。世界 こんにちは 👩‍👩‍👧‍👦 Z͑ͫ̓ͪ̂ͫ",
    "\x00\ufffe\u2028" * 50,
]


@pytest.fixture
def read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary takes its time, as in a new process: other tests share what was read before."""
    monkeypatch.setattr(proxy.wire.counting, "_build", inspect.unwrap(proxy.wire.counting._build))


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer()
    yield made
    made.close()


def shipped(name: str) -> bytes:
    """The vocabulary that ships with Weir, as tiktoken wants its file."""
    packed = vocabulary_directories()[0] / f"{name}.tiktoken.zst"
    return zstandard.ZstdDecompressor().decompress(packed.read_bytes())


@pytest.fixture(scope="module", params=ENCODINGS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiktoken.Encoding:
    """tiktoken's own encoding, loaded its own way."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / FILES[request.param]).write_bytes(shipped(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return tiktoken.get_encoding(request.param)


class Ticks:
    """How often the event loop comes round while something else is awaited."""

    async def __aenter__(self) -> Self:
        self.count = 0
        self._task = asyncio.create_task(self._probe())
        await asyncio.sleep(0.01)
        self.count = 0
        return self

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.count += 1

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


@pytest.mark.requirement("D10")
@pytest.mark.parametrize(
    ("model", "encoding"),
    [
        ("gpt-4o", "o200k_base"),
        ("gpt-4o-mini-2024-07-18", "o200k_base"),
        ("gpt-4.1-nano", "o200k_base"),
        ("gpt-4.5-preview", "o200k_base"),
        ("gpt-5", "o200k_base"),
        ("gpt-5.4-mini", "o200k_base"),
        ("o1", "o200k_base"),
        ("o3-mini", "o200k_base"),
        ("o4-mini", "o200k_base"),
        ("chatgpt-4o-latest", "o200k_base"),
        ("ft:gpt-4o:org::id", "o200k_base"),
        ("gpt-4", "cl100k_base"),
        ("GPT-4-Turbo", "cl100k_base"),
        ("gpt-4-0613", "cl100k_base"),
        ("openai/gpt-4", "cl100k_base"),
        ("openrouter/openai/gpt-4:free", "cl100k_base"),
        ("azure/gpt-35-turbo", "cl100k_base"),
        ("gpt-3.5-turbo-16k", "cl100k_base"),
        ("ft:gpt-3.5-turbo:org", "cl100k_base"),
        ("text-embedding-3-small", "cl100k_base"),
        ("claude-sonnet-4-5", "o200k_base"),
        ("", "o200k_base"),
    ],
)
def test_the_encoding_follows_the_model(model: str, encoding: str, tokenizer: Tokenizer) -> None:
    assert encoding_name(model) == encoding
    assert tokenizer.counter(model).name == encoding


@pytest.mark.requirement("R.23")
@pytest.mark.parametrize("text", SAMPLES)
def test_counts_are_those_of_tiktoken(tokenizer: Tokenizer, reference: tiktoken.Encoding, text: str) -> None:
    assert tokenizer.counter(reference.name).count(text) == len(reference.encode(text, disallowed_special=()))


def test_the_pieces_of_a_long_text_count_exactly_what_the_whole_does(
    tokenizer: Tokenizer, reference: tiktoken.Encoding
) -> None:
    source = Path(proxy.wire.counting.__file__).read_text()
    prose = "The quick brown fox, at 10:30, jumped over 17 lazy dogs; they didn't care. "
    for text in (source * (450_000 // len(source)), prose * 6_000):
        parts = list(pieces(text))
        assert len(parts) > 4
        assert "".join(parts) == text
        assert tokenizer.counter(reference.name).count(text) == len(reference.encode_ordinary(text))


@pytest.mark.requirement("R.22")
def test_a_run_that_tiktoken_refuses_is_counted_in_halves(tokenizer: Tokenizer) -> None:
    source = tokenizer.counter("o200k_base")._source
    assert isinstance(source, Vocabulary)
    assert source.count("load") == 1
    assert source._encoding is not None
    blanks = " " * 2_000_000
    with pytest.raises(BaseException, match=r"[Ss]tack"):  # a panic in Rust is no Exception
        source._encoding.encode_ordinary(blanks)
    assert source.count(blanks) == pytest.approx(tokenizer.counter("o200k_base").count(blanks), rel=0.02)


@pytest.mark.requirement("R.22", "S.26")
async def test_three_megabytes_of_chinese_leave_the_event_loop_alone(tokenizer: Tokenizer) -> None:
    counter = tokenizer.counter("gpt-4o")
    await counter.load()
    text = "".join(chr(0x4E00 + (i * 7_919) % 20_000) for i in range(1_000_000))
    async with Ticks() as ticks:
        counts = await counter.count_many([text[:10], text, "hello"])
    assert counts[0] == counter.count(text[:10])
    assert counts[1] > 1_000_000
    assert counts[2] == 1
    assert ticks.count > 10, "the event loop waited"


@pytest.mark.requirement("S.26")
async def test_however_much_is_counted_at_once_two_threads_do_it() -> None:
    tokenizer = Tokenizer()
    counter, before = tokenizer.counter("gpt-4o"), set(threading.enumerate())
    await counter.load()
    texts = [f"{number} " + "lorem ipsum " * 10_000 for number in range(12)]
    await asyncio.gather(*(counter.count_many([text]) for text in texts))
    assert 1 <= len(set(threading.enumerate()) - before) <= 2
    tokenizer.close()


@pytest.mark.usefixtures("read_anew")
async def test_the_first_count_loads_off_the_event_loop_however_short_it_is() -> None:
    tokenizer = Tokenizer()
    counter = tokenizer.counter("gpt-4o")
    before = set(threading.enumerate())
    ready = [counter.is_ready]
    assert await counter.count_many(["hello"]) == [1]
    ready.append(counter.is_ready)
    assert ready == [False, True]
    assert set(threading.enumerate()) - before
    tokenizer.close()


def without_shipped(cache_dir: Path) -> Tokenizer:
    """One that has only the user's own files to look for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.wire.counting.vocabulary_directories", lambda cache: (cache,))
        return Tokenizer(cache_dir=cache_dir)


@pytest.mark.requirement("D10")
async def test_without_a_vocabulary_characters_are_counted_and_the_reason_is_told(tmp_path: Path) -> None:
    tokenizer = without_shipped(tmp_path)
    counter = tokenizer.counter("gpt-4o")
    reasons = [counter.reason]
    await counter.load()
    reasons.append(counter.reason)
    assert reasons[0] is None
    assert str(tmp_path) in (reasons[1] or "")
    assert not counter.is_exact
    assert counter.count("x" * 100) == 40
    assert await counter.count_many(["x" * 100, "y" * 200_000]) == [40, 80_000]
    tokenizer.close()


@pytest.mark.parametrize("damage", [b"", b"garbage", b"IQ== 0\n"])
def test_a_damaged_vocabulary_is_not_used(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILES["o200k_base"]).write_bytes(damage)
    alone, backed = without_shipped(tmp_path), Tokenizer(cache_dir=tmp_path)
    assert alone.counter("gpt-4o").count("hello world") == 4
    assert "intact" in (alone.counter("gpt-4o").reason or "")
    assert backed.counter("gpt-4o").count("hello world") == 2
    alone.close()
    backed.close()


def test_counting_imports_no_litellm_and_leaves_the_environment_alone() -> None:
    script = (
        "import os, sys; before = dict(os.environ)\n"
        "from proxy.wire.counting import Tokenizer\n"
        "t = Tokenizer(); assert t.counter('gpt-4o').count('hello world') == 2; t.close()\n"
        "assert dict(os.environ) == before; assert 'litellm' not in sys.modules; assert 'requests' not in sys.modules\n"
    )
    root = Path(proxy.wire.counting.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, env=os.environ, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.requirement("A1.6")
async def test_an_estimator_from_an_entry_point_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words.py").write_text(
        "class Words:\n    def count(self, text):\n        return len(text.split()) if text != 'bad' else 1 / 0\n"
    )
    meta = tmp_path / "words-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[weir.estimators]\nwords = words:Words\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = Tokenizer(estimators=installed_estimators())
    counter = tokenizer.counter("words")
    assert counter.count("four words are here") == 4
    assert await counter.count_many(["a b", "c " * 10_000]) == [2, 10_000]
    assert counter.count("bad") == CHARS2_5.count("bad")
    tokenizer.close()
