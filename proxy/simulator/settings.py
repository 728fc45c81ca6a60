"""What a simulator does: its window, its dialect, its answers and its misbehaviour, as one frozen value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Request = Mapping[str, Any]


class Dialect(StrEnum):
    """Whose errors, extras and endpoints are spoken."""

    OPENAI = "openai"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    ANTHROPIC = "anthropic"


class SummaryMode(StrEnum):
    """How a request for a summary is answered; everything but ``ok`` is a way for a summariser to fail.

    ``slow`` answers after ``summary_seconds``. ``invented`` adds identifiers that the material does not have, ``drops``
    leaves out every path, ``launders`` repeats what tool results order as what the user wants. ``first_bad_then_ok`` is
    of use only when it is told that an earlier answer was refused. ``no_schema`` refuses ``response_format``,
    ``empty_form`` fills nothing into a schema, and ``reasoning_model`` refuses what OpenAI's reasoning models do:
    ``max_tokens`` and a temperature.
    """

    OK = "ok"
    SLOW = "slow"
    INVENTED = "invented"
    LAUNDERS = "launders"
    DROPS = "drops"
    FIRST_BAD_THEN_OK = "first_bad_then_ok"
    NO_SCHEMA = "no_schema"
    EMPTY_FORM = "empty_form"
    REASONING_MODEL = "reasoning_model"
    STATUS_500 = "status_500"
    STATUS_401 = "status_401"
    STATUS_429 = "status_429"
    NOT_UTF8 = "not_utf8"
    WHITESPACE = "whitespace"
    GARBAGE = "garbage"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    ECHO = "echo"
    REFUSAL = "refusal"
    TOOL_CALL = "tool_call"
    TOO_LONG = "too_long"
    REASONING_ONLY = "reasoning_only"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an answer; ``arguments`` is JSON text, ``id`` None stands for a generated one."""

    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model says; ``finish`` overrides the finish reason in OpenAI's words."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    finish: str | None = None


Script = Callable[[Request], Answer | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """A simulator in full.

    Attributes:
        window: tokens of prompt and answer together; ``windows`` has other sizes by model.
        max_output: most tokens an answer may ask for, None for no cap but the window.
        models: ids that ``GET /v1/models`` lists; a request may name any model.
        strict: judge the message array as OpenAI does.
        allow_prefill: accept a plain assistant message at the end without a ``prefix`` mark.
        latency: seconds before the first byte of a chat answer; ``chunk_delay`` between two events.
        answers: the answer for a request with n assistant messages is ``answers[n]``; past the end the default.
        answer: a function of the request that takes the place of ``answers``.
        summary_model: requests of this model are summary requests and get ``summary_mode``; so do all whose system
            prompt asks for a summary, and conversations whose last message does.
        summary_seconds: seconds before a summary in the mode ``slow``.
        wording: name in ``WORDINGS`` for overflow errors, None for the dialect's own.
        fault: a fault for every chat request, as in the header ``x-sim-fault``.
        api_keys: accepted credentials; empty accepts any, and none.
        cache_entries: prefixes that the cache remembers; ``cache_minimum`` the least tokens that count as a hit.
        ledger_bytes: bodies kept in the ledger, in bytes; the oldest entries go first.
    """

    window: int = 8192
    windows: Mapping[str, int] = field(default_factory=dict)
    max_output: int | None = None
    dialect: Dialect = Dialect.OPENAI
    seed: int = 0
    models: tuple[str, ...] = ("sim",)
    strict: bool = True
    allow_prefill: bool = False
    latency: float = 0.0
    chunk_delay: float = 0.0
    answers: tuple[Answer | str, ...] = ()
    answer: Script | None = None
    summary_model: str | None = None
    summary_mode: SummaryMode = SummaryMode.OK
    summary_seconds: float = 1.0
    wording: str | None = None
    fault: str | None = None
    api_keys: tuple[str, ...] = ()
    cache_entries: int = 100_000
    cache_minimum: int = 0
    ledger_bytes: int = 256 * 1024 * 1024

    def window_of(self, model: str) -> int:
        """Tokens that ``model`` holds."""
        return self.windows.get(model, self.window)
