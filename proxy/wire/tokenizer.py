"""Exact counting with tiktoken: without network, off the event loop, and never an exception.

A vocabulary is looked for in the user's own cache directory, under the name that tiktoken gives it there (the SHA-1
of the file's address), and then among the compressed ones that ship with Weir. Without one, characters are counted.
Long text is cut into pieces: tiktoken gives up on about a million blanks, and no other request should wait for
somebody's megabyte.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from threading import Lock
from types import FunctionType

import tiktoken
import zstandard
from tiktoken_ext import openai_public  # type: ignore[import-untyped]  # a namespace package without py.typed

from policies.media import bare_name
from policies.tokens import CHARS2_5, HEURISTICS, CharCounter, TokenCounter

ESTIMATORS_GROUP = "weir.estimators"
ENCODINGS = ("o200k_base", "cl100k_base")
INLINE_CHARS = 8_192
PIECE_CHARS = 50_000
MIN_PIECE = 1_000

_CL100K = re.compile(r"gpt-(?:4(?![.\w])|3\.?5)|text-embedding-(?:3|ada-002)|(?:davinci|babbage)-002")
_SAFE_CUT = re.compile(r"(?s).*(?:\n(?=[A-Za-z])|[A-Za-z](?= [A-Za-z]))")
_SEEK_CUT = 2_000


def encoding_name(model: str) -> str:
    """``cl100k_base`` for gpt-4, gpt-3.5 and the embeddings of their time, ``o200k_base`` for every other name."""
    return "cl100k_base" if _CL100K.match(bare_name(model)) else "o200k_base"


def vocabulary_directories(cache_dir: Path | None = None) -> tuple[Path, ...]:
    """Where vocabulary files may be, best first: ``cache_dir``, then Weir's own."""
    shipped = Path(str(files("proxy") / "vocabularies"))
    return (cache_dir, shipped) if cache_dir is not None else (shipped,)


def installed_estimators() -> dict[str, TokenCounter]:
    """Estimators that other packages offer as entry points of the group ``weir.estimators``, by name.

    An entry point names a callable without arguments that returns a :class:`TokenCounter`; one that cannot be
    loaded raises what its package raises.
    """
    return {point.name: point.load()() for point in entry_points(group=ESTIMATORS_GROUP)}


def check_estimator(name: str) -> str | None:
    """What is wrong with a policy's ``estimator``; None for ``tokenizer`` and whatever counts under that name."""
    own = ("tokenizer", *HEURISTICS, *ENCODINGS)
    if name in own:
        return None  # entry points are read from every installed package, and every policy asks
    known = [*own, *(point.name for point in entry_points(group=ESTIMATORS_GROUP))]
    return None if name in known else f"no estimator {name}; there are: {', '.join(sorted(known))}"


class VocabularyMissing(Exception):
    """No directory has the file of an encoding with the right content."""


class Vocabulary:
    """One of tiktoken's encodings, loaded when it is first needed, once. Counts characters where it is missing.

    Loading takes 0.3 to 0.5 s and 84 MB, and holds the interpreter for half of that time even off the loop:
    it belongs before the first request.
    """

    def __init__(self, name: str, directories: Sequence[Path]) -> None:
        self.name = name
        self.reason: str | None = None
        self.is_loaded = False
        self._directories = tuple(directories)
        self._encoding: tiktoken.Encoding | None = None
        self._lock = Lock()

    def load(self) -> None:
        """Read the file unless that was done; afterwards ``reason`` says why there is no vocabulary, or is None."""
        with self._lock:
            if self.is_loaded:
                return
            try:
                self._encoding = _build(self.name, self._directories)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, characters can be counted
                self.reason = f"{self.name}: {error or type(error).__name__}"
            self.is_loaded = True

    def count(self, text: str) -> int:
        """Tokens of ``text``; loads the vocabulary first where that was not done."""
        if not self.is_loaded:
            self.load()
        if self._encoding is None:
            return CHARS2_5.count(text)
        return _count(self._encoding, text)


class TextCounter:
    """A :class:`TokenCounter` that also counts many texts at once without keeping the event loop."""

    def __init__(self, name: str, source: TokenCounter, executor: ThreadPoolExecutor) -> None:
        self.name = name
        self._source = source
        self._executor = executor

    @property
    def reason(self) -> str | None:
        """Why characters are counted instead of the vocabulary that was asked for; None if all is well."""
        return self._source.reason if isinstance(self._source, Vocabulary) else None

    @property
    def is_exact(self) -> bool:
        """True if a vocabulary counts; what it is loaded from is known only after the first count."""
        return isinstance(self._source, Vocabulary) and self._source.reason is None

    @property
    def is_ready(self) -> bool:
        """True if the next count loads nothing."""
        return not isinstance(self._source, Vocabulary) or self._source.is_loaded

    def count(self, text: str) -> int:
        """Tokens of ``text``, counted here and now; never raises."""
        source = self._source
        if isinstance(source, CharCounter) or (isinstance(source, Vocabulary) and len(text) <= PIECE_CHARS):
            return source.count(text)
        return self._count_pieces(pieces(text))

    async def count_many(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text: at once up to 8 KB together, else by a worker thread, 50,000 characters at a time."""
        if isinstance(self._source, CharCounter) or (self.is_ready and _size(texts) <= INLINE_CHARS):
            return [self.count(text) for text in texts]
        loop = asyncio.get_running_loop()
        totals = [0] * len(texts)
        for batch in _batches(texts):
            counts = await loop.run_in_executor(self._executor, self._count_batch, batch)
            for (index, _), tokens in zip(batch, counts, strict=True):
                totals[index] += tokens
        return totals

    async def load(self) -> None:
        """Load the vocabulary off the event loop, if there is one to load."""
        if isinstance(self._source, Vocabulary):
            await asyncio.get_running_loop().run_in_executor(self._executor, self._source.load)

    def _count_batch(self, batch: Sequence[tuple[int, str]]) -> list[int]:
        return [self._count_pieces((piece,)) for _, piece in batch]

    def _count_pieces(self, parts: Iterable[str]) -> int:
        if isinstance(self._source, Vocabulary):
            return sum(self._source.count(part) for part in parts)
        return sum(_count_guarded(self._source, part) for part in parts)


class Tokenizer:
    """The counters of every model, sharing vocabularies and a few worker threads.

    ``cache_dir`` is the user's ``TIKTOKEN_CACHE_DIR``; ``directories`` replaces the places where files are looked
    for; ``estimators`` are counters by name beside the built-in ``o200k_base``, ``cl100k_base``, ``chars4`` and
    ``chars2.5``.
    """

    def __init__(
        self,
        *,
        cache_dir: Path | None = None,
        directories: Sequence[Path] | None = None,
        estimators: Mapping[str, TokenCounter] | None = None,
        workers: int = 2,
    ) -> None:
        places = vocabulary_directories(cache_dir) if directories is None else tuple(directories)
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="weir-tokens")
        sources: dict[str, TokenCounter] = {n: Vocabulary(n, places) for n in ENCODINGS}
        sources |= HEURISTICS
        sources |= estimators or {}
        self._counters = {name: TextCounter(name, source, self._executor) for name, source in sources.items()}

    def counter(self, model_or_encoding: str) -> TextCounter:
        """The counter of that name, else that of the model's encoding; loads nothing yet."""
        known = self._counters.get(model_or_encoding)
        return known if known is not None else self._counters[encoding_name(model_or_encoding)]

    def close(self) -> None:
        """Let the worker threads end; what is being counted is finished."""
        self._executor.shutdown(wait=False)


def pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of at most 50,000 characters.

    A cut is made where every encoding starts a new token anyway (a line of letters, a word after a word), so
    that the sum over the pieces is exact; where there is no such place it may be one token too much.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        stop = start + PIECE_CHARS
        safe = _SAFE_CUT.match(text, stop - _SEEK_CUT, stop)
        stop = safe.end() if safe is not None else stop
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        for piece in pieces(text):
            if batch and size + len(piece) > PIECE_CHARS:
                yield batch
                batch, size = [], 0
            batch.append((index, piece))
            size += len(piece) + 64
    if batch:
        yield batch


def _size(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


def _count(encoding: tiktoken.Encoding, text: str) -> int:
    """Tokens of ``text``; halves what tiktoken refuses, down to 1,000 characters, which count half their bytes.

    ``encode_ordinary`` takes ``<|endoftext|>`` as text, and lone surrogates as replacement characters. A run of
    about a million blanks is a ``ValueError``, or a ``PanicException`` that is no ``Exception``.
    """
    try:
        return len(encoding.encode_ordinary(text))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - a panic in Rust arrives as a BaseException that cannot be imported
        if len(text) <= MIN_PIECE:
            return (len(text.encode("utf-8", "surrogatepass")) + 1) // 2
    half = len(text) // 2
    return _count(encoding, text[:half]) + _count(encoding, text[half:])


def _count_guarded(source: TokenCounter, text: str) -> int:
    try:
        return max(0, int(source.count(text)))
    except Exception:  # noqa: BLE001 - an estimator from another package must not cost a request
        return CHARS2_5.count(text)


def _build(name: str, directories: Sequence[Path]) -> tiktoken.Encoding:
    """The encoding with its ranks read from ``directories``; raises where no file is right.

    tiktoken's constructor knows the pattern, the special tokens and the checksum, but finds its file through
    the process environment and then the network. It is run with another reader in place of that one.
    """

    def read(address: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _read_ranks(address, expected_hash, directories)

    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    if "load_tiktoken_bpe" not in constructor.__code__.co_names:
        raise VocabularyMissing(f"tiktoken {tiktoken.__version__} reads its files in another way")
    offline = FunctionType(constructor.__code__, {**constructor.__globals__, "load_tiktoken_bpe": read})
    return tiktoken.Encoding(**offline())


def _read_ranks(address: str, expected_hash: str | None, directories: Sequence[Path]) -> dict[bytes, int]:
    """Token bytes to rank from the first directory whose file has the expected SHA-256."""
    name = hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()
    packed = f"{address.rpartition('/')[2]}.zst"
    for directory in directories:
        if (directory / name).is_file():
            data = (directory / name).read_bytes()
        elif (directory / packed).is_file():
            data = zstandard.ZstdDecompressor().decompress((directory / packed).read_bytes())
        else:
            continue
        if expected_hash is None or hashlib.sha256(data).hexdigest() == expected_hash:
            lines = (line.split() for line in data.splitlines() if line)
            return {base64.b64decode(token): int(rank) for token, rank in lines}
    searched = ", ".join(map(str, directories)) or "no directory"
    raise VocabularyMissing(f"no intact file {name} or {packed} in {searched}")
