"""What is known about a model: window, input and output limits, prices.

Sources, best first: the policy or flag, the operator's rule, the upstream's own word, litellm's
table (a data file; litellm is not imported), and as a last resort four times the output limit. A
smaller limit that an upstream stated in an error overrides all of them while it lasts.

``window`` is the whole context window W; ``max_input`` is I, the input limit, only where a provider
has one below the window. litellm's ``max_input_tokens`` is W for most models and I for others, see
``_SEPARATE``. An upstream is queried once, and the answer is kept for a while: OpenAI's listing
says nothing about windows, but vLLM, llama.cpp, OpenRouter and LM Studio put it there, llama.cpp
says it in ``/props`` and Ollama in ``/api/show``.
"""

import asyncio
import dataclasses
import importlib.util
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from policies.quality.prices import PROVIDERS, Cliff, TokenPrices
from policies.settings import ContextSettings
from proxy.access.destination import rule_for
from proxy.config.values import ModelRule
from proxy.tap import ReportedUsage

logger = logging.getLogger("weir.models")

Source = Literal[
    "policy", "rule", "upstream", "learned", "table", "family", "last_resort", "unknown"
]

_TABLE = "model_prices_and_context_window_backup.json"
_MODES = frozenset({"chat", "completion", "responses"})

_SEPARATE: Mapping[tuple[int, int], tuple[int, int]] = {
    # (max_input_tokens, max_output_tokens) of the table -> (W, I). All rows with these pairs are
    # OpenAI's gpt-5 and later: its pages state a window of 400,000 and 128,000 output, its errors a
    # limit of 272,000.
    (272_000, 128_000): (400_000, 272_000),
    (400_000, 128_000): (400_000, 272_000),
    (922_000, 128_000): (1_050_000, 922_000),
    (1_050_000, 128_000): (1_050_000, 922_000),
    # Azure's gpt-5.x-chat: 128,000 in all.
    (111_616, 16_384): (128_000, 111_616),
}

_FAMILIES: tuple[tuple[str, int, int | None, int | None], ...] = (
    # prefix, W, I, longest output: for names newer than the table; the first match, and the
    # smallest of a family.
    ("gpt-3.5-turbo", 16_385, None, 4_096),
    ("gpt-4-turbo", 128_000, None, 4_096),
    ("gpt-4.1", 1_047_576, None, 32_768),
    ("gpt-4o", 128_000, None, 16_384),
    ("gpt-5-chat", 128_000, None, 16_384),
    ("gpt-5", 400_000, 272_000, 128_000),
    ("gpt-6", 400_000, 272_000, 128_000),
    ("o1-mini", 128_000, None, 65_536),
    ("o1-preview", 128_000, None, 32_768),
    ("o1", 200_000, None, 100_000),
    ("o3", 200_000, None, 100_000),
    ("o4", 200_000, None, 100_000),
    ("claude-", 200_000, None, None),
    ("gemini-2", 1_048_576, None, 8_192),
    ("gemini-3", 1_048_576, None, 65_536),
)

LONG = 1_000_000
"""Tokens of the window of a model whose name ends with ``[1m]``, or that is requested from
Anthropic with that beta.
"""
_LONG_TAG = "[1m]"
BETA = b"anthropic-beta"
_LONG_BETA = b"context-1m-"
_EXTENDED_FROM = 200_000  # a smaller window is a server's of its own
_LATEST = re.compile(r"[-@]latest$")
_VERSION = re.compile(r"\d+(?:[-.]\d+)*")
_DATE = re.compile(r"(?:[-@](?:\d{4}-\d{2}-\d{2}|20\d{6}|latest))+$")
# OpenRouter's variants with the same window
_ROUTE = re.compile(r":(?:free|nitro|floor|online|exacto|beta)$")
_DEARER = re.compile(rb'"(in|out)put_cost_per_token_above_(\d+)k_tokens":\s*([\d.eE+-]+)')
_TUNED = re.compile(r"^ft:([^:]+):.*$")
_MAX_WARNED = 1000
_MAX_REMEMBERED = 4096
_MAX_NAME_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Tokens, and US dollars per token; None where unknown. ``source`` is the window's."""

    window: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    input_price: float | None = None
    output_price: float | None = None
    cache_read_price: float | None = None
    cache_write_price: float | None = None
    cliff: Cliff | None = None
    source: Source = "unknown"


class _Row(msgspec.Struct, gc=False):
    mode: str | None = None
    max_input_tokens: int | float | None = None
    max_output_tokens: int | float | None = None
    max_tokens: int | float | None = None
    input_cost_per_token: float | None = None
    output_cost_per_token: float | None = None
    cache_read_input_token_cost: float | None = None
    cache_creation_input_token_cost: float | None = None


def table_path() -> Path | None:
    """Found without importing litellm."""
    spec = importlib.util.find_spec("litellm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / _TABLE).is_file():
            return path
    return None


def read_table(path: Path) -> dict[str, ModelFacts]:
    facts: dict[str, ModelFacts] = {}
    for name, raw in msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw]).items():
        try:
            row = msgspec.json.decode(raw, type=_Row)
        except msgspec.ValidationError:
            continue
        if row.mode in _MODES:
            facts[name.lower()] = _from_row(row, _cliff(row, raw))
    return facts


def _cliff(row: _Row, raw: msgspec.Raw) -> Cliff | None:
    dearer = {(what, int(above)): float(price) for what, above, price in _DEARER.findall(raw)}
    above = min((above for what, above in dearer if what == b"in"), default=0)
    if not above or not row.input_cost_per_token:
        return None
    answer = dearer.get((b"out", above), 0.0) / (row.output_cost_per_token or 1.0)
    return Cliff(
        1000 * above,
        round(dearer[b"in", above] / row.input_cost_per_token, 3),
        round(answer, 3) or 1.0,
    )


def _from_row(row: _Row, cliff: Cliff | None) -> ModelFacts:
    limit = sensible_tokens(row.max_input_tokens) or sensible_tokens(row.max_tokens)
    longest = sensible_tokens(row.max_output_tokens)
    window = limit
    max_input = None
    if limit and longest and (limit, longest) in _SEPARATE:
        window, max_input = _SEPARATE[limit, longest]
    return ModelFacts(
        window=window,
        max_input=max_input,
        max_output=longest,
        input_price=row.input_cost_per_token,
        output_price=row.output_cost_per_token,
        cache_read_price=row.cache_read_input_token_cost,
        cache_write_price=row.cache_creation_input_token_cost,
        cliff=cliff,
        source="table",
    )


def long_name(model: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The name under which a model's window is looked up and learned: with ``[1m]`` where a beta
    requests that.
    """
    asks = any(name == BETA and _LONG_BETA in value for name, value in headers)
    return f"{model}{_LONG_TAG}" if asks and not is_long(model) else model


def is_long(model: str) -> bool:
    return model[-len(_LONG_TAG) :].lower() == _LONG_TAG


def plain_name(model: str) -> str:
    """The name without ``[1m]``."""
    return model[: -len(_LONG_TAG)] if is_long(model) else model


class ModelRegistry:
    def __init__(self, rules: Sequence[ModelRule] = (), *, table: Path | None = None) -> None:
        self.rules = rules
        self._path = table
        self._table: dict[str, ModelFacts] | None = None
        self._bare: dict[str, ModelFacts] = {}
        self._remembered = lru_cache(_MAX_REMEMBERED)(self._looked_up)
        self._warned: set[str] = set()

    def load(self) -> int:
        if self._table is None:
            path = self._path or table_path()
            self._table = read_table(path) if path is not None and path.is_file() else {}
            self._bare = _by_bare_name(self._table)
        return len(self._table)

    def known(self, model: str) -> ModelFacts:
        """What the table says of a name: exact, then without prefix, date or route, then its
        family.

        ``claude-opus-latest``, where the table has no such name, is the newest ``claude-opus-``
        that it has.
        """
        return ModelFacts() if len(model) > _MAX_NAME_LEN else self._remembered(plain_name(model))

    def _looked_up(self, model: str) -> ModelFacts:
        self.load()
        table = self._table or {}
        for name in spellings(model):
            if (found := table.get(name)) is not None and found.window is not None:
                return found
        for name in spellings(model):
            if (found := self._bare.get(name.rsplit("/", 1)[-1])) is not None:
                return found
        bare = _TUNED.sub(r"\1", model.lower()).rsplit("/", 1)[-1]
        if _LATEST.search(bare) and (newest := self._newest(_LATEST.sub("", bare))) is not None:
            return newest
        for prefix, window, max_input, longest in _FAMILIES:
            if bare.startswith(prefix):
                return ModelFacts(
                    window=window, max_input=max_input, max_output=longest, source="family"
                )
        return ModelFacts()

    def _newest(self, line: str) -> ModelFacts | None:
        """Of the models called ``line``, a dash and a version, the one with the highest."""
        for names in (self._table or {}, self._bare):
            found: dict[tuple[int, ...], ModelFacts] = {}
            for name, facts in names.items():
                version = _DATE.sub("", name).removeprefix(f"{line}-")
                if (
                    name.startswith(f"{line}-")
                    and facts.window is not None
                    and _VERSION.fullmatch(version)
                ):
                    found[tuple(map(int, re.split("[-.]", version)))] = facts
            if found:
                return found[max(found)]
        return None

    def list_price(self, model: str, usage: ReportedUsage) -> float | None:
        """What tokens of a model cost in US dollars by what the operator and the table say, None
        where neither has a price.
        """
        prices = prices_of(model, self.facts(model, settings=ContextSettings())) if model else None
        return None if prices is None else cost_of(prices, usage)

    def facts(
        self,
        model: str,
        *,
        settings: ContextSettings,
        upstream_facts: ModelFacts | None = None,
        max_tokens: int | None = None,
    ) -> ModelFacts:
        merged = self.known(model)
        if upstream_facts is not None:
            merged = _over(merged, upstream_facts)
        if is_long(model) and (merged.window or _EXTENDED_FROM) >= _EXTENDED_FROM:
            merged = _over(
                merged, ModelFacts(window=max(LONG, merged.window or LONG), source="family")
            )
        stated = ModelFacts(window=settings.window, source="policy")
        for better in (_from_rule(rule_for(self.rules, plain_name(model))), stated):
            merged = _over(merged, better) if better is not None else merged
        if merged.window is None:
            merged = self._last_resort(model, merged, max_tokens)
        return merged

    def _last_resort(self, model: str, facts: ModelFacts, max_tokens: int | None) -> ModelFacts:
        longest = max_tokens if max_tokens and max_tokens > 0 else facts.max_output
        if longest is None:
            return facts
        if model not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(model)
            logger.warning(
                "no window known for model %r: assuming 4 x %d output tokens", model[:200], longest
            )
        return dataclasses.replace(facts, window=4 * longest, source="last_resort")


def _over(base: ModelFacts, better: ModelFacts) -> ModelFacts:
    """A window that is raised above the known one voids its input limit."""
    values = {
        item.name: value
        for item in dataclasses.fields(better)
        if item.name != "source" and (value := getattr(better, item.name)) is not None
    }
    if better.window is None:
        return dataclasses.replace(base, **values)
    if base.window is not None and better.window > base.window and better.max_input is None:
        values["max_input"] = None
    merged = dataclasses.replace(base, **values, source=better.source)
    if merged.max_input is not None and merged.max_input >= better.window:
        return dataclasses.replace(merged, max_input=None)
    return merged


def _from_rule(rule: ModelRule | None) -> ModelFacts | None:
    if rule is None:
        return None
    stated = {
        name: getattr(rule.prices, name)
        for name in ("input", "output", "cache_read", "cache_write")
    }
    prices = {
        f"{name}_price": price / MILLION for name, price in stated.items() if price is not None
    }
    return ModelFacts(
        window=rule.window,
        max_input=rule.max_input,
        max_output=rule.max_output,
        source="rule",
        **prices,
    )


_BINDING = re.compile(r"claude-(fable|mythos|opus|sonnet|haiku)-(\d{1,2})[-.](\d{1,2})(?!\d)")


def binds_reasoning(model: str) -> bool:
    """If a model signs what it thinks for all that precedes it (platform.claude.com, "Preserved
    thinking").
    """
    found = _BINDING.search(model.lower())
    if found is None:
        return False
    version = int(found.group(2)), int(found.group(3))
    return version >= ((5, 1) if found.group(1) in ("fable", "mythos") else (5, 5))


def spellings(model: str) -> tuple[str, ...]:
    """Names under which a table may list the model, most exact first.

    ``openrouter/anthropic/claude-sonnet-4.5:free`` also is ``anthropic/claude-sonnet-4.5``,
    ``claude-sonnet-4.5`` and ``claude-sonnet-4-5``; ``gpt-4o-2031-01-01`` also is ``gpt-4o``.
    """
    name = model.lower()
    whole = [name, _TUNED.sub(r"\1", name), _ROUTE.sub("", name)]
    forms = [*whole, *(_DATE.sub("", form) for form in whole)]
    tails = [form.split("/", cut)[-1] for form in forms for cut in range(form.count("/") + 1)]
    dashed = [tail.replace(".", "-") for tail in tails if tail.startswith("claude")]
    return tuple(dict.fromkeys((*forms, *tails, *dashed)))


def _by_bare_name(table: Mapping[str, ModelFacts]) -> dict[str, ModelFacts]:
    """By the last part of ``provider/…/name``; where providers differ the smallest window, without
    prices.
    """
    found: dict[str, ModelFacts] = {}
    for name, facts in table.items():
        if "/" not in name or facts.window is None:
            continue
        bare = name.rsplit("/", 1)[-1]
        held = found.get(bare)
        if held is None:
            found[bare] = facts
        elif held != facts:
            low = min(held, facts, key=lambda each: each.window or 0)
            found[bare] = ModelFacts(
                window=low.window,
                max_input=low.max_input,
                max_output=low.max_output,
                source="table",
            )
    return found


def sensible_tokens(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value < 10**9 else None


PATIENCE = 2.0
GOOD_FOR = 600.0
MAX_BODY = 4 * 1024 * 1024

Fetch = Callable[[str, bytes | None], Awaitable[tuple[int, bytes]]]
"""GET a URL, or POST a body to it: status and content."""


@dataclass(slots=True)
class _Answer:
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    anything: ModelFacts | None = None
    until: float = 0.0


class Probe:
    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def known(self, key: str, model: str) -> ModelFacts | None:
        answer = self._answers.get(key)
        return None if answer is None else answer.models.get(model) or answer.anything

    def is_due(self, key: str) -> bool:
        answer = self._answers.get(key)
        return answer is None or answer.until < time.monotonic()

    def has_answered(self, key: str) -> bool:
        """Until the upstream was queried a plan could differ from that of a process that did."""
        return key in self._answers

    async def ask(self, key: str, base_url: str, model: str, fetch: Fetch) -> ModelFacts | None:
        """Waits for at most two seconds; requests under way are shared."""
        task = self.ask_later(key, base_url, model, fetch)
        if task is not None:
            await asyncio.wait({task}, timeout=PATIENCE)
        return self.known(key, model)

    def ask_later(
        self, key: str, base_url: str, model: str, fetch: Fetch
    ) -> asyncio.Task[None] | None:
        if not self.is_due(key):
            return None
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(key, base_url, model, fetch), name="weir-probe")
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _ask(self, key: str, base_url: str, model: str, fetch: Fetch) -> None:
        answer = _Answer(until=time.monotonic() + GOOD_FOR)
        root = f"{urlsplit(base_url).scheme}://{urlsplit(base_url).netloc}"
        answer.models = parse_upstream_models(await _json(fetch, f"{base_url}/models"))
        if model not in answer.models:
            answer.anything = parse_props(await _json(fetch, f"{root}/props"))
            if answer.anything is None:
                shown = parse_show(
                    await _json(fetch, f"{root}/api/show", json.dumps({"model": model}).encode())
                )
                answer.models = {**answer.models, **({model: shown} if shown is not None else {})}
        self._answers[key] = answer


async def _json(fetch: Fetch, url: str, body: bytes | None = None) -> Any:
    try:
        async with asyncio.timeout(PATIENCE):
            status, content = await fetch(url, body)
        return json.loads(content[:MAX_BODY]) if status == 200 else None
    except Exception:  # noqa: BLE001 - whatever an unknown server does to this question must not matter
        return None


def parse_upstream_models(answer: object) -> dict[str, ModelFacts]:
    """What ``GET /v1/models`` says beyond names, by id.

    vLLM and SGLang ``max_model_len``, llama.cpp ``meta.n_ctx`` (not ``n_ctx_train``), OpenRouter
    ``context_length``, ``top_provider`` and ``pricing``, LM Studio ``loaded_context_length``, Groq
    ``context_window``, Mistral ``max_context_length``, Anthropic ``max_input_tokens``.
    """
    entries = answer.get("data", answer.get("models")) if isinstance(answer, Mapping) else answer
    found: dict[str, ModelFacts] = {}
    for entry in map(_mapping, entries if isinstance(entries, list) else ()):
        name = entry.get("id")
        facts = _from_entry(entry)
        if isinstance(name, str) and facts.window is not None:
            found[name] = facts
    return found


_WINDOWS = (
    *("loaded_context_length", "max_model_len", "context_window"),
    *("context_length", "max_context_length", "max_input_tokens"),
)
_OUTPUTS = ("max_completion_tokens", "max_output_tokens")


def _from_entry(entry: Mapping[str, object]) -> ModelFacts:
    meta = _mapping(entry.get("meta"))
    top = _mapping(entry.get("top_provider"))
    prices = _mapping(entry.get("pricing"))
    stated = [
        sensible_tokens(meta.get("n_ctx")),
        *(sensible_tokens(entry.get(name)) for name in _WINDOWS),
    ]
    window = next((value for value in stated if value is not None), None)
    routed = sensible_tokens(top.get("context_length"))
    longest = [sensible_tokens(part.get(name)) for part in (top, entry) for name in _OUTPUTS]
    return ModelFacts(
        window=min(window, routed) if window and routed else window or routed,
        max_output=next((value for value in longest if value is not None), None),
        input_price=_price(prices.get("prompt")),
        output_price=_price(prices.get("completion")),
        cache_read_price=_price(prices.get("input_cache_read")),
        cache_write_price=_price(prices.get("input_cache_write")),
        source="upstream",
    )


def parse_props(answer: object) -> ModelFacts | None:
    slot = _mapping(_mapping(answer).get("default_generation_settings"))
    window = sensible_tokens(slot.get("n_ctx"))
    return ModelFacts(window=window, source="upstream") if window else None


_NUM_CTX = re.compile(r"^num_ctx[ \t]+(\d{1,9})[ \t]*$", re.MULTILINE)
OLLAMA_DEFAULT = 4_096
"""Tokens that Ollama allots on a small GPU where neither the model nor the operator sets it
(docs.ollama.com/context-length); it cuts longer prompts without an error, so the smallest default
counts.
"""


def parse_show(answer: object) -> ModelFacts | None:
    """Ollama's ``POST /api/show``: ``num_ctx``, else its default."""
    body = _mapping(answer)
    info = _mapping(body.get("model_info"))
    trained = next(
        (sensible_tokens(value) for key, value in info.items() if key.endswith(".context_length")),
        None,
    )
    parameters = body.get("parameters")
    stated = _NUM_CTX.search(parameters[:65_536]) if isinstance(parameters, str) else None
    if stated is None and trained is None:
        return None
    allotted = sensible_tokens(int(stated.group(1))) if stated else OLLAMA_DEFAULT
    window = (
        min(each for each in (allotted, trained) if each is not None)
        if allotted or trained
        else None
    )
    return ModelFacts(window=window, source="upstream")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _price(value: object) -> float | None:
    """OpenRouter writes dollars per token as text; negative means that it depends."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        price = float(value)
    except ValueError:
        return None
    return price if 0 <= price < 1 else None


DEFAULT_PRICES = "anthropic"
MINIMUM = 1_024
MILLION = 1_000_000
CACHED_PRICE = 0.1


class BadPrices(ValueError): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    prices: TokenPrices
    dollars: bool
    source: str

    def shown(self, cost: float) -> str:
        if not self.dollars:
            return f"{cost / 1000:,.1f}k"
        return f"${cost:,.2f}" if cost >= 1 else f"${cost:.4f}"


def price_list(stated: str | None, *, model: str, facts: ModelFacts) -> PriceList:
    """What was ``stated`` (a provider's name, or input,read,write,output), else the model's prices,
    else a default.

    Raises BadPrices for a statement that is neither.
    """
    if stated is not None or facts.input_price is None:
        return _stated(DEFAULT_PRICES if stated is None else stated)
    plain = facts.input_price
    read = facts.cache_read_price
    write = facts.cache_write_price
    prices = TokenPrices(
        plain,
        plain if read is None else read,
        plain if write is None else write,
        facts.output_price or 0.0,
        minimum=0 if read is None else MINIMUM,
        cliff=facts.cliff,
    )
    return PriceList(prices=prices, dollars=True, source=f"the price list for {model}")


def _stated(stated: str) -> PriceList:
    if stated in PROVIDERS:
        return PriceList(prices=PROVIDERS[stated], dollars=False, source=f"the ratios of {stated}")
    try:
        numbers = [float(part) / MILLION for part in stated.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(0 <= number < 1 for number in numbers):
        known = ", ".join(PROVIDERS)
        raise BadPrices(
            f"{stated} is neither one of {known} nor four dollar prices: input,read,write,output"
        )
    plain, read, write, answer = numbers
    return PriceList(
        prices=TokenPrices(plain, read, write, answer, minimum=MINIMUM), dollars=True, source=stated
    )


@lru_cache(maxsize=1024)
def prices_of(model: str, facts: ModelFacts) -> TokenPrices | None:
    """US dollars a token; a cached one costs a tenth where no source says."""
    if facts.input_price is None:
        return None
    listed = price_list(None, model=model, facts=facts).prices
    read = (
        facts.cache_read_price
        if facts.cache_read_price is not None
        else CACHED_PRICE * facts.input_price
    )
    return TokenPrices(listed.input, read, listed.cache_write, listed.output, cliff=listed.cliff)


def cost_of(prices: TokenPrices, usage: ReportedUsage) -> float:
    prompt = usage.prompt or 0
    cached = usage.cached or 0
    written = usage.written or 0
    plain = max(0, prompt - cached - written)
    read = prices.input * plain + prices.cache_read * cached + prices.cache_write * written
    return tiered(prices, prompt, read, usage.completion or 0)


def tiered(prices: TokenPrices, prompt: int, read: float, answer: int) -> float:
    cliff = prices.cliff
    if cliff is None or prompt <= cliff.above:
        return read + prices.output * answer
    return read * cliff.input + prices.output * answer * cliff.output
