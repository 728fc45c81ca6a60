"""Tokens: text by tiktoken's exact count, media by formula, framing by constants. Never raises,
needs no network.

A vocabulary is looked for in the user's cache directory, under the name that tiktoken gives it
there (the SHA-1 of the file's address), then among those that ship with Weir; without one
characters are counted. Long text is counted in pieces off the event loop: tiktoken gives up on
about a million blanks. Framing is what OpenAI's cookbook measured; calibration learns where a
template differs. Base64 is never counted as text.
"""

import asyncio
import hashlib
import json
import math
import re
from binascii import a2b_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.resources import files
from itertools import islice
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any

import msgspec
import tiktoken
import zstandard
from tiktoken_ext import openai_public  # type: ignore[import-untyped]  # a namespace package without py.typed

from policies.tokens import (
    CHARS2_5,
    HEURISTICS,
    CharCounter,
    TokenCounter,
    bare_name,
    is_media,
    part_tokens,
)

ESTIMATORS_GROUP = "weir.estimators"
ENCODINGS = ("o200k_base", "cl100k_base")
INLINE_CHARS = 8_192
PIECE_CHARS = 50_000
MIN_PIECE = 1_000
PANIC = "PanicException"

_CL100K = re.compile(
    r"gpt-(?:4(?![.\w])|3\.?5)|text-embedding-(?:3|ada-002)|(?:davinci|babbage)-002"
)
_SAFE_CUT = re.compile(r"(?s).*(?:\n(?=[A-Za-z])|[A-Za-z](?= [A-Za-z]))")
_SEEK_CUT = 2_000


@lru_cache(maxsize=1024)
def encoding_name(model: str) -> str:
    return "cl100k_base" if _CL100K.match(bare_name(model)) else "o200k_base"


def vocabulary_directories(cache_dir: Path | None = None) -> tuple[Path, ...]:
    shipped = Path(str(files("proxy") / "vocabularies"))
    return (cache_dir, shipped) if cache_dir is not None else (shipped,)


def installed_estimators() -> dict[str, TokenCounter]:
    return {point.name: point.load()() for point in entry_points(group=ESTIMATORS_GROUP)}


def check_estimator(name: str) -> str | None:
    own = ("tokenizer", *HEURISTICS, *ENCODINGS)
    if name in own:
        return None  # entry points are read from every installed package, for every policy
    known = [*own, *(point.name for point in entry_points(group=ESTIMATORS_GROUP))]
    return None if name in known else f"no estimator {name}; there are: {', '.join(sorted(known))}"


class VocabularyMissing(Exception): ...


class Vocabulary:
    """One of tiktoken's encodings, loaded when it is first needed, once. Counts characters where it
    is missing.

    Loading takes 0.3 s and 45 MB, and holds the interpreter for half of that time even off the
    loop: it belongs before the first request.
    """

    def __init__(self, name: str, directories: Sequence[Path]) -> None:
        self.name = name
        self.reason: str | None = None
        self.is_loaded = False
        self._directories = tuple(directories)
        self._encoding: tiktoken.Encoding | None = None
        self._lock = Lock()

    def load(self) -> None:
        with self._lock:
            if self.is_loaded:
                return
            try:
                self._encoding = _build(self.name, self._directories)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, characters can be counted
                self.reason = f"{self.name}: {error or type(error).__name__}"
            self.is_loaded = True

    def count(self, text: str) -> int:
        if not self.is_loaded:
            self.load()
        if self._encoding is None:
            return CHARS2_5.count(text)
        return _count(self._encoding, text)


class TextCounter:
    """A :class:`TokenCounter` that also counts many texts at once without keeping the event
    loop.
    """

    def __init__(self, name: str, source: TokenCounter, executor: ThreadPoolExecutor) -> None:
        self.name = name
        self._source = source
        self._executor = executor

    @property
    def reason(self) -> str | None:
        """Why characters are counted instead of the vocabulary that was requested; None if all is
        well.
        """
        return self._source.reason if isinstance(self._source, Vocabulary) else None

    @property
    def is_exact(self) -> bool:
        return isinstance(self._source, Vocabulary) and self._source.reason is None

    @property
    def is_ready(self) -> bool:
        return not isinstance(self._source, Vocabulary) or self._source.is_loaded

    def count(self, text: str) -> int:
        source = self._source
        if isinstance(source, CharCounter) or (
            isinstance(source, Vocabulary) and len(text) <= PIECE_CHARS
        ):
            return source.count(text)
        return self._count_pieces(pieces(text))

    async def count_many(self, texts: Sequence[str], *, inline: int = INLINE_CHARS) -> list[int]:
        source = self._source
        if isinstance(source, CharCounter) or (self.is_ready and sum(map(len, texts)) <= inline):
            return [*map(source.count if isinstance(source, Vocabulary) else self.count, texts)]
        loop = asyncio.get_running_loop()
        totals = [0] * len(texts)
        for batch in _batches(texts):
            counts = await loop.run_in_executor(self._executor, self._count_batch, batch)
            for (index, _), tokens in zip(batch, counts, strict=True):
                totals[index] += tokens
        return totals

    def guessing(self, characters: int, tokens: int) -> "TextCounter":
        """A counter that estimates a text by its length from a measured ratio of tokens to
        characters, a little above it.
        """
        source = CharCounter(math.ceil(1_050 * tokens / max(1, characters)), 1_000)
        return TextCounter(self.name, source, self._executor)

    async def load(self) -> None:
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

    ``cache_dir`` is the user's ``TIKTOKEN_CACHE_DIR``; ``estimators`` are counters by name in
    addition to the built-in ``o200k_base``, ``cl100k_base``, ``chars4`` and ``chars2.5``.
    """

    def __init__(
        self, *, cache_dir: Path | None = None, estimators: Mapping[str, TokenCounter] | None = None
    ) -> None:
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weir-tokens")
        places = vocabulary_directories(cache_dir)
        sources: dict[str, TokenCounter] = {n: Vocabulary(n, places) for n in ENCODINGS}
        sources |= HEURISTICS
        sources |= estimators or {}
        self._counters = {
            name: TextCounter(name, source, self._executor) for name, source in sources.items()
        }

    def counter(self, model_or_encoding: str) -> TextCounter:
        known = self._counters.get(model_or_encoding)
        return known if known is not None else self._counters[encoding_name(model_or_encoding)]

    @property
    def waiting(self) -> int:
        return self._executor._work_queue.qsize()  # noqa: SLF001 - the executor exposes it nowhere else

    def close(self) -> None:
        self._executor.shutdown(wait=False)


def pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of at most 50,000 characters.

    A cut is made where every encoding starts a new token anyway (a line of letters, a word after a
    word), so that the sum over the pieces is exact; where there is no such place it may be one
    token too much.
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
                batch = []
                size = 0
            batch.append((index, piece))
            size += len(piece) + 64
    if batch:
        yield batch


def _count(encoding: tiktoken.Encoding, text: str) -> int:
    """Tokens of ``text``; halves what tiktoken refuses, down to 1,000 characters, which count half
    their bytes.

    ``encode_ordinary`` takes ``<|endoftext|>`` as text, and lone surrogates as replacement
    characters. A run of about a million blanks is a ``ValueError``, or a ``PanicException`` that is
    no ``Exception``.
    """
    try:
        return len(encoding.encode_ordinary(text))
    except BaseException as error:
        # a panic in Rust arrives as a BaseException that cannot be imported
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
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

    tiktoken's constructor knows the pattern, the special tokens and the checksum, but finds its
    file through the process environment and then the network. It is run with another reader in
    place of that one.
    """

    def read(address: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _read_ranks(address, expected_hash, directories)

    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    if "load_tiktoken_bpe" not in constructor.__code__.co_names:
        raise VocabularyMissing(f"tiktoken {tiktoken.__version__} reads its files in another way")
    offline = FunctionType(
        constructor.__code__, {**constructor.__globals__, "load_tiktoken_bpe": read}
    )
    encoding = tiktoken.Encoding(**offline())
    encoding._mergeable_ranks = {}  # noqa: SLF001 - 29 MB that only its methods for single tokens read; the core has its own
    return encoding


def _read_ranks(
    address: str, expected_hash: str | None, directories: Sequence[Path]
) -> dict[bytes, int]:
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
            fields = data.split()
            return dict(zip(map(a2b_base64, fields[::2]), map(int, fields[1::2]), strict=True))
    searched = ", ".join(map(str, directories)) or "no directory"
    raise VocabularyMissing(f"no intact file {name} or {packed} in {searched}")


MESSAGE_OVERHEAD = 4
NAME_OVERHEAD = 1
CALL_OVERHEAD = 8
UNCOUNTED = frozenset(
    {"weir", "cache_control", "provider_specific_fields", "annotations", "parsed"}
)
BLOB_CHARS = 2_048

FUNCTION_INIT = 7
FUNCTION_INIT_OLD = 10
PROPERTY_INIT = 3
PROPERTY_KEY = 3
ENUM_INIT = -3
ENUM_ITEM = 3
FUNCTION_END = 12
CLAUDE_TOOLS = 346

_BASE64 = re.compile(r"[A-Za-z0-9+/=_\-\r\n]*")
_BASE64_SAMPLE = 1_024
_OPENAI = re.compile(r"(?:chat)?gpt-(?!oss)|o[1-9](?![a-z0-9])")
_OLD = re.compile(r"gpt-(?:4(?![.\w])|3\.?5)")
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_PLAIN = frozenset({"role", "content", "tool_call_id"})
_UNUSUAL = frozenset({"refusal", "reasoning_content", "reasoning", "reasoning_details"})
_CALLED = ("name", "arguments", "input")
_NESTED_SCHEMAS = ("items", "additionalProperties", "not")
_NESTED_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NESTED_MAPS = ("$defs", "definitions")


class Countable(msgspec.Struct, frozen=True):
    """What something of a ``role`` costs: ``fixed`` tokens (framing, media) and the ``texts`` that
    a counter adds.
    """

    fixed: int
    texts: tuple[str, ...] = ()
    role: str = ""

    def count(self, counter: TokenCounter) -> int:
        return max(0, self.fixed + sum(counter.count(text) for text in self.texts))


def count_message(message: Mapping[str, Any], counter: TokenCounter, *, model: str) -> int:
    return message_texts(message, model=model).count(counter)


def count_tools(
    tools: Any, functions: Any, response_format: Any, counter: TokenCounter, *, model: str
) -> int:
    return tool_texts(tools, functions, response_format, model=model).count(counter)


async def count_all(items: Sequence[Countable], counter: TextCounter) -> list[int]:
    counts = iter(await counter.count_many([text for item in items for text in item.texts]))
    return [max(0, item.fixed + sum(islice(counts, len(item.texts)))) for item in items]


SLICE = 128
# characters per slice of up to 64 KB; more text takes more only by its root
EVERY = 8 * SLICE
MANY = 64
# two milliseconds: a turn through a thread takes ten times that where the loop is busy
INLINE_SAMPLE = 32 * 1024
CUT_TOKENS = 1.8
CUT_SHARE = 0.06
"""What a slice has more than its share of the text: its line's end, and words that were cut in two.
"""
MAX_ERROR = 0.10
"""The share by which the tokens of at least 64 KB of text may be wrong that were counted by slices;
in recorded conversations it is 0.05 at most (``tests/functional/test_sampled_counts.py``).
"""


async def sample_all(items: Sequence[Countable], counter: TextCounter) -> list[int]:
    """By slices of what each role says: one part is counted for all messages of a role, which share
    by their length.
    """
    said: dict[str, list[str]] = {}
    for item in items:
        said.setdefault(item.role, []).extend(item.texts)
    wholes = {role: "\n".join(texts) for role, texts in said.items()}
    samples = [_slices(whole) for whole in wholes.values()]
    counts = await counter.count_many(
        ["\n".join(slices) for slices in samples], inline=INLINE_SAMPLE
    )
    shares = {
        role: (
            (count if len(slices) == 1 else _scaled(count, slices, len(whole))) / max(1, len(whole))
        )
        for (role, whole), slices, count in zip(wholes.items(), samples, counts, strict=True)
    }
    return [
        max(0, item.fixed + round(shares[item.role] * sum(map(len, item.texts)))) for item in items
    ]


def _slices(text: str) -> list[str]:
    if len(text) <= 4 * SLICE:
        return [text]
    number = max(2, round(len(text) / EVERY))
    number = min(number, round(math.sqrt(MANY * number)))
    step = len(text) / number
    return [text[(at := int((n + 0.5) * step - SLICE / 2)) : at + SLICE] for n in range(number)]


def _scaled(count: int, slices: Sequence[str], size: int) -> int:
    cut = min(CUT_TOKENS * (len(slices) - 1), CUT_SHARE * count)
    return max(1, round((count - cut) * size / sum(map(len, slices))))


def message_texts(message: Any, *, model: str, image_tokens: int | None = None) -> Countable:
    if not isinstance(message, dict):
        return Countable(MESSAGE_OVERHEAD, _texts(message))
    fixed = MESSAGE_OVERHEAD
    texts = list[str]()
    content = message.get("content")
    role = message.get("role")
    if isinstance(content, str):
        texts += (content,) if content else ()
    elif content is not None:
        counted = _content_texts(content, model=model, image_tokens=image_tokens)
        fixed += counted.fixed
        texts += counted.texts
    if not message.keys() <= _PLAIN:
        name = message.get("name")
        if isinstance(name, str) and name:
            fixed += NAME_OVERHEAD
            texts.append(name)
        if not _UNUSUAL.isdisjoint(message):
            texts += (*_texts(message.get("refusal")), *_reasoning_texts(message))
        calls = message.get("tool_calls")
        for call in (*(calls if isinstance(calls, list) else ()), message.get("function_call")):
            if call:
                fixed += CALL_OVERHEAD
                texts += _call_texts(call)
        audio = message.get("audio")
        if isinstance(audio, dict):
            said = _texts(audio.get("transcript"))
            texts += said
            fixed += 0 if said else part_tokens({"type": "audio", "audio": audio}, model=model)
    return Countable(fixed, tuple(texts), role if isinstance(role, str) else "")


def tool_texts(tools: Any, functions: Any, response_format: Any, *, model: str) -> Countable:
    name = bare_name(model)
    definitions = [
        item for group in (tools, functions) if isinstance(group, list) for item in group
    ]
    fixed = 0
    texts = list[str]()
    if _OPENAI.match(name):
        init = FUNCTION_INIT_OLD if _OLD.match(name) else FUNCTION_INIT
        fixed = FUNCTION_END if definitions else 0
        for definition in definitions:
            function = _function_texts(definition, init)
            fixed += function.fixed
            texts += function.texts
    else:
        fixed = CLAUDE_TOOLS if definitions and "claude" in name else 0
        texts += [json_text(definition) for definition in definitions]
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if schema:
        texts.append(json_text(schema))
    return Countable(fixed, tuple(texts))


def json_text(value: Any) -> str:
    out: list[str] = []
    stack: list[Iterator[tuple[str, Any]]] = [iter((("", value),))]
    closing = [""]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            out.append(closing.pop())
            continue
        prefix, item = entry
        if isinstance(item, dict):
            out.append(prefix + "{")
            closing.append("}")
            stack.append(_members(item))
        elif isinstance(item, list | tuple):
            out.append(prefix + "[")
            closing.append("]")
            stack.append((", " if number else "", each) for number, each in enumerate(item))
        else:
            out.append(prefix + _scalar(item))
    return "".join(out)


def is_blob(text: str) -> bool:
    """True for a ``data:`` URL or base64 of more than 2 KB, judged by its first, middle and last
    KB.
    """
    if len(text) <= BLOB_CHARS:
        return False
    if text[:5].lower() == "data:" and text.find(",", 0, BLOB_CHARS) > 0:
        return True
    middle = len(text) // 2
    samples = (
        text[:_BASE64_SAMPLE],
        text[middle : middle + _BASE64_SAMPLE],
        text[-_BASE64_SAMPLE:],
    )
    return all(_BASE64.fullmatch(sample) for sample in samples)


def _content_texts(content: Any, *, model: str, image_tokens: int | None) -> Countable:
    fixed = 0
    texts = list[str]()
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        elif not isinstance(part, dict):
            texts += _texts(part)
        elif is_media(part):
            fixed += part_tokens(part, model=model, image_tokens=image_tokens)
        elif part.get("type") == "tool_result":
            waiting.append(part.get("content"))
        elif part.get("type") == "tool_use":
            fixed += CALL_OVERHEAD
            texts += _call_texts(part)
        else:
            texts += _part_texts(part)
    return Countable(fixed, tuple(texts))


def _part_texts(part: Mapping[str, Any]) -> tuple[str, ...]:
    kind = part.get("type", "text")
    text = part.get(_TEXT_KEYS[kind]) if isinstance(kind, str) and kind in _TEXT_KEYS else None
    return (text,) if isinstance(text, str) else (json_text(part),)


def _reasoning_texts(message: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("reasoning_content", "reasoning"):
        if texts := _texts(message.get(key)):
            return texts
    details = message.get("reasoning_details")
    if not isinstance(details, list):
        return _texts(details)
    said = [
        (each.get("text"), each.get("summary")) if isinstance(each, dict) else (each,)
        for each in details
    ]
    return tuple([text for parts in said for part in parts for text in _texts(part)])


def _call_texts(call: Any) -> tuple[str, ...]:
    if not isinstance(call, dict):
        return _texts(call)
    inner = call.get("function")
    if not isinstance(inner, dict):
        inner = custom if isinstance(custom := call.get("custom"), dict) else call
    return tuple([text for key in _CALLED if key in inner for text in _texts(inner[key])])


def _function_texts(definition: Any, init: int) -> Countable:
    function = (
        definition.get("function", definition) if isinstance(definition, dict) else definition
    )
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or "format" in function
    ):
        return Countable(init, (json_text(definition),))
    fixed = init
    texts = [f"{function['name']}:{_described(function)}"]
    waiting = [function.get("parameters"), function.get("input_schema")]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        properties = schema.get("properties")
        if isinstance(properties, dict) and properties:
            fixed += PROPERTY_INIT + PROPERTY_KEY * len(properties)
            for key, value in properties.items():
                kind = value.get("type", "") if isinstance(value, dict) else ""
                shown = kind if isinstance(kind, str) else json_text(kind)
                texts.append(f"{key}:{shown}:{_described(value)}")
            waiting += properties.values()
        options = schema.get("enum")
        if isinstance(options, list):
            fixed += ENUM_INIT + ENUM_ITEM * len(options)
            texts += (text for option in options for text in _texts(option))
        waiting += _nested(schema)
    return Countable(fixed, tuple(texts))


def _nested(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema.get(key) for key in _NESTED_SCHEMAS)
    for key in _NESTED_LISTS:
        if isinstance(branches := schema.get(key), list):
            yield from branches
    for key in _NESTED_MAPS:
        if isinstance(definitions := schema.get(key), dict):
            yield from definitions.values()


def _described(value: Any) -> str:
    description = value.get("description") if isinstance(value, dict) else None
    return description.removesuffix(".") if isinstance(description, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return () if value is None or value in ([], {}) else (json_text(value),)


def _members(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    separator = ""
    for key, value in mapping.items():
        if key in UNCOUNTED or (isinstance(value, str) and is_blob(value)):
            continue
        yield f"{separator}{_scalar(key)}: ", value
        separator = ", "


def _scalar(value: Any) -> str:
    if isinstance(value, str) and is_blob(value):
        return '""'
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 10_000:
        return "9" * (value.bit_length() * 3 // 10)
    return json.dumps(value, ensure_ascii=False, default=str)
