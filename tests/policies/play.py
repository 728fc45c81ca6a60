"""Conversations in a line each, and flows played without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

from policies.draft import Bounds, ConversationState, Draft
from policies.effects import Done, Effect, Failed, Flow, Offload, Reply, Save
from policies.ledger import Cut, Decision, Edit, Trend
from policies.limits import TokenBudget
from policies.messages import Body, Message, ToolCall, Transcript, chain_of, head_length
from policies.planner import plan
from policies.settings import ContextSettings
from policies.strategies.layers import STRATEGIES
from policies.tokens import CHARS4

T = TypeVar("T")


def play(flow: Flow[T], *script: tuple[Effect | type[Effect], Reply]) -> T:
    """What a flow returns when it asks for exactly what the script says (an effect or its type) and is told that.

    A state that is to be saved and that the script does not name is refused: there is no store.
    """
    lines = [*script]
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            assert not lines, f"returned before {lines[0][0]}"
            return end.value  # type: ignore[no-any-return]
        if isinstance(asked, Save) and not (lines and lines[0][0] is Save):
            reply = Failed("store")
            continue
        assert lines, f"the script is over, the flow asks for {asked}"
        ask, reply = lines.pop(0)
        assert asked == ask or (isinstance(ask, type) and isinstance(asked, ask)), f"asks for {asked}, not {ask}"


def strategy(name: str) -> Callable[[Draft, Bounds], Draft]:
    """What a strategy that asks nobody makes of a draft, with the parameters of the layer at work."""
    return lambda draft, bounds: STRATEGIES[name].of(bounds.layer.params).apply(draft, bounds)


def flow(name: str) -> Callable[[Draft, Bounds], Flow[Draft]]:
    """The same for one that asks."""
    return lambda draft, bounds: STRATEGIES[name].of(bounds.layer.params).run(draft, bounds)


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None
    keep: bool | None = None
    media: int = 0

    @property
    def message(self) -> Message:
        """The facts that planning needs: four tokens a message, 85 a picture, a token for four characters."""
        named = [f"{c.name}\0{c.arguments}" for c in self.calls]
        digest = blake2b("\1".join((self.role, self.text, *named, str(self.media))).encode(), digest_size=16).digest()
        return Message(
            role=self.role,
            digest=digest,
            tokens=4 + CHARS4.count(self.text) + sum(CHARS4.count(n) + 4 for n in named) + 85 * self.media,
            call_ids=tuple(c.id for c in self.calls),
            answers=self.answers,
            keep=self.keep,
            media=self.media,
        )


def words(tokens: int, word: str = "lorem") -> str:
    """Text of exactly ``tokens`` tokens; different words make different texts."""
    return (((word + " ") * (4 * tokens // (len(word) + 1) + 1))[: 4 * tokens - 1] + ".") if tokens else ""


def user(text: str, *, keep: bool | None = None, media: int = 0) -> Said:
    return Said("user", text, keep=keep, media=media)


def system(text: str) -> Said:
    return Said("system", text)


def assistant(text: str = "", *calls: ToolCall, keep: bool | None = None) -> Said:
    return Said("assistant", text, calls, keep=keep)


def result(text: str, answers: str | None = "call_0", *, keep: bool | None = None) -> Said:
    return Said("function" if answers is None else "tool", text, answers=answers, keep=keep)


def step(text: str, *, tool: str = "look", arguments: str = "{}", call: str = "call_0") -> tuple[Said, Said]:
    """One assistant message that calls one tool, and the result."""
    return assistant("", ToolCall(call, tool, arguments)), result(text, call)


def talk(*said: Said | Sequence[Said], tools: int = 0) -> Transcript:
    """The transcript of what was said, steps given as sequences."""
    flat = [m for s in said for m in ((s,) if isinstance(s, Said) else s)]
    messages = tuple(s.message for s in flat)
    bodies = tuple(Body(s.text, s.calls, "", s.media) for s in flat)
    head = head_length(messages)
    return Transcript(
        messages=messages,
        read=bodies.__getitem__,
        chain=chain_of("tenant", messages, head),
        head=head,
        tools=tools,
    )


def window(tokens: int, *, reserve: int = 0, headroom: int = 0) -> TokenBudget:
    """A budget without an estimator error, so that its numbers are round."""
    return TokenBudget(window=tokens, reserve=reserve, floor=reserve, headroom=headroom)


def remember(known: ConversationState, decision: Decision, transcript: Transcript) -> ConversationState:
    """What a shell knows after a request: its edits merged, its cut appended, all of its messages sent."""
    cuts: tuple[Cut, ...] = known.cuts if decision.cut is None else (*known.cuts, decision.cut)
    edits: dict[tuple[bytes, int], Edit] = {**known.edits, **{e.key: e for e in decision.edits}}
    length = len(transcript.chain)
    return replace(
        known,
        edits=edits,
        cuts=cuts,
        length=length,
        prepared=known.prepared if decision.cut is None else None,
        checkpoint=decision.checkpoint or known.checkpoint,
        checkpoint_length=length if decision.checkpoint else known.checkpoint_length,
        version=known.version + decision.is_new,
    )


def decide(
    transcript: Transcript,
    *,
    budget: TokenBudget,
    settings: ContextSettings | None = None,
    known: ConversationState | None = None,
    ceiling: int | None = None,
    trend: Trend | None = None,
    at: float | None = None,
    script: Sequence[tuple[Effect | type[Effect], Reply]] | None = None,
) -> Decision:
    """The decision on a request; without a script the flow may ask for nothing but to go off the event loop."""
    flow = plan(
        transcript,
        settings=settings or ContextSettings(),
        budget=budget,
        known=known or ConversationState(),
        counter=CHARS4,
        ceiling=ceiling,
        trend=trend or Trend(),
        at=at,
    )
    if script is not None:
        return play(flow, *script)
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        assert isinstance(asked, Offload), f"asked for {asked} without a model"
        reply = Done()
