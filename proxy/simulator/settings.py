"""What a simulator does: its window, its dialect, its answers and its misbehaviour, as one frozen value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.simulator.answers import Script, SimulatedAnswer
from proxy.simulator.delivery import FAULTS, FaultRule
from proxy.simulator.errors import Dialect, OversizedPrompt
from proxy.simulator.summaries import SummaryWriter

Wording = tuple[int, Callable[[OversizedPrompt], Any]]


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
        summary_model: requests of this model are summary requests; so are all whose system prompt asks for a summary,
            and conversations whose last message does. ``summarizer`` answers them.
        summary_seconds: seconds before a summary, in the place of ``latency``.
        wording: whose words an overflow error has, of a dialect or of ``wordings`` (status and body); None for the
            dialect's own.
        fault: a fault for every chat request, as in the header ``x-sim-fault``; ``faults`` are all that there are.
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
    answers: tuple[SimulatedAnswer | str, ...] = ()
    answer: Script | None = None
    summary_model: str | None = None
    summarizer: SummaryWriter = field(default_factory=SummaryWriter)
    summary_seconds: float | None = None
    wording: str | None = None
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    fault: str | None = None
    faults: Mapping[str, FaultRule] = field(default_factory=lambda: FAULTS)
    api_keys: tuple[str, ...] = ()
    cache_entries: int = 100_000
    cache_minimum: int = 0
    ledger_bytes: int = 256 * 1024 * 1024

    def window_of(self, model: str) -> int:
        """Tokens that ``model`` holds."""
        return self.windows.get(model, self.window)
