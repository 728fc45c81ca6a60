"""What recorded conversations consist of: the figures that the choice of a policy and of a trigger rests on."""

from collections import Counter
from dataclasses import dataclass, field, replace

from policies import ContextSettings, ToolCall
from policies.quality.advise import Advice, TokenPrices, ToolUse, Traffic, advise
from proxy.replay.scenarios import Conditions
from proxy.replay.script import Script

UNNAMED = "unknown"


@dataclass(frozen=True, slots=True)
class Pace:
    """How a conversation grows: tokens a request adds, and tokens that can never be removed, in its last request."""

    growth: float
    fixed: int


def pace_of(script: Script) -> Pace:
    """The mean growth over a conversation's requests; 0 with fewer than two."""
    counted = [request.length for request in script.requests if request.counts]
    if not counted:
        return Pace(0.0, 0)
    first, last = script.transcript(counted[0]), script.transcript(counted[-1])
    growth = (last.tokens - first.tokens) / (len(counted) - 1) if len(counted) > 1 else 0.0
    users = [message.tokens for message in last.messages if message.role == "user"]
    head = sum(message.tokens for message in last.messages[: last.head])
    ends = sum(users[:1]) + (users[-1] if len(users) > 1 else 0)
    return Pace(max(0.0, growth), head + last.tools + last.priming + ends)


def advice_for(script: Script, settings: ContextSettings, conditions: Conditions, prices: TokenPrices) -> Advice:
    """Where a policy's batches should start and end for the money, if all conversations were like this one."""
    pace, budget = pace_of(script), conditions.budget(settings)
    return advise(
        prices, growth=pace.growth, fixed=pace.fixed, window=budget.window, usable=budget.usable, settings=settings
    )


def advised(settings: ContextSettings, advice: Advice) -> ContextSettings:
    """The policy with its trigger and low water as advised, in every window."""
    return replace(settings, name=f"{settings.name}, advised", shapes=(replace(advice.shape, window=None),))


@dataclass(slots=True)
class _Tool:
    calls: int = 0
    tokens: int = 0
    largest: int = 0
    repeated: int = 0


@dataclass(slots=True)
class TrafficCount:
    """Adds up conversations one by one; :attr:`traffic` is what they came to."""

    conversations: int = 0
    requests: int = 0
    turns: int = 0
    marked: int = 0
    _buckets: Counter[str] = field(default_factory=Counter)
    _tools: dict[str, _Tool] = field(default_factory=dict)

    def add(self, script: Script) -> None:
        """Count one conversation, the whole of it once."""
        length = len(script.recording.raws)
        transcript = script.transcript(length)
        self.conversations += 1
        self.requests += len(script.recording.requests)
        self.turns += sum(message.role == "user" for message in transcript.messages)
        self.marked += sum(message.keep is True for message in transcript.messages)
        self._buckets.update(script.buckets(script.raw_pieces(length), priming=transcript.priming))
        self._add_results(script, length)

    def _add_results(self, script: Script, length: int) -> None:
        calls: dict[str, ToolCall] = {}
        digests: set[bytes] = set()
        asked: set[tuple[str, str]] = set()
        for index, message in enumerate(script.messages[:length]):
            calls |= {call.id: call for call in script.read(index).calls}
            if not message.is_result:
                continue
            call = calls.get(message.answers or "")
            tool = self._tools.setdefault(call.name if call is not None else UNNAMED, _Tool())
            tool.calls += 1
            tool.tokens += message.tokens
            tool.largest = max(tool.largest, message.tokens)
            key = (call.name, call.arguments) if call is not None else None
            if message.digest in digests or key in asked:
                tool.repeated += message.tokens
            digests.add(message.digest)
            if key is not None:
                asked.add(key)

    @property
    def traffic(self) -> Traffic:
        """The figures so far."""
        tools = tuple(
            ToolUse(name=name, calls=t.calls, tokens=t.tokens, largest=t.largest, repeated=t.repeated)
            for name, t in sorted(self._tools.items())
        )
        return Traffic(
            conversations=self.conversations,
            requests=self.requests,
            turns=self.turns,
            buckets=dict(self._buckets),
            tools=tools,
            marked=self.marked,
        )
