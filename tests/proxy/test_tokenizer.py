from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.tokens import CHARS2_5
from proxy.wire.counting import Tokenizer, Vocabulary, encoding_name, installed_estimators


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer()
    yield made
    made.close()


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
