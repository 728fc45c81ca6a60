"""What a feature adds to the kernel: hooks that the exchange and the process call.

A hook is called for each feature that defines it, in the event loop: it must not wait. What it
raises is logged and costs no client its request.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from policies.health import HealthAlert
from proxy.config.values import Config
from proxy.planning.values import Plan
from proxy.store.records import ConversationRow

log = logging.getLogger("weir.features")

F = TypeVar("F", bound="Feature")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One managed request: whose it is, and under which policy.

    ``conversation`` is None until the request is recognized.
    """

    request: str
    tenant: str
    model: str
    policy: str
    conversation: str | None = None

    @property
    def about(self) -> dict[str, str | None]:
        """The fields of a line in the log."""
        return {"request": self.request, "conversation": self.conversation}


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that does not fit, as it was planned or as the upstream answered it.

    ``tokens`` and ``limit`` are None where they are not known.
    """

    source: Literal["planned", "upstream"]
    tokens: int | None = None
    limit: int | None = None


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    status: int | None
    outcome: str
    tokens_before: int | None
    tokens_after: int | None
    zone: str
    actions: str


class Feature:
    """A part of Weir that is attached to its kernel; every hook is optional."""

    __slots__ = ()

    def start(self) -> None:
        """Begin what runs in the background."""

    def adopt(self, config: Config) -> None:
        """Go on with a configuration that was read anew."""

    def on_read(self, turn: Turn) -> None:
        """A request was read, and its policy is known."""

    def on_planned(self, turn: Turn, plan: Plan) -> None:
        """A request was planned, and was not sent yet."""

    def on_overflow(self, turn: Turn, overflow: Overflow) -> None:
        """A request does not fit; it may be planned again."""

    def on_answered(self, turn: Turn, end: TurnEnd) -> None:
        """A request has ended, and its client has its answer."""

    def on_alerts(self, turn: Turn, alerts: Sequence[HealthAlert]) -> None:
        """Alerts about a conversation's health began with a request."""

    def forget(self, conversation: ConversationRow) -> None:
        """Drop what is held in memory of a conversation that was deleted."""

    async def close(self) -> None:
        """End what runs in the background."""


class Features:
    """The features of one process, in the order in which their hooks are called."""

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self._features = tuple(features)
        self.on_read = self._defined("on_read")
        self.on_planned = self._defined("on_planned")
        self.on_overflow = self._defined("on_overflow")
        self.on_answered = self._defined("on_answered")
        self.on_alerts = self._defined("on_alerts")

    def __getitem__(self, kind: type[F]) -> F:
        """The feature of a class. Raises KeyError where there is none."""
        for feature in self._features:
            if isinstance(feature, kind):
                return feature
        raise KeyError(kind.__name__)

    def start(self) -> None:
        for feature in self._features:
            feature.start()

    def adopt(self, config: Config) -> None:
        for feature in self._features:
            feature.adopt(config)

    def forget(self, conversation: ConversationRow) -> None:
        for feature in self._features:
            feature.forget(conversation)

    async def close(self) -> None:
        for feature in self._features:
            await feature.close()

    def _defined(self, hook: str) -> tuple[Callable[..., None], ...]:
        own = getattr(Feature, hook)
        return tuple(getattr(f, hook) for f in self._features if getattr(type(f), hook) is not own)


def emit(hooks: Iterable[Callable[..., None]], turn: Turn, *facts: Any) -> None:
    """Call hooks, one after another; one that fails does not stop the others."""
    for hook in hooks:
        try:
            hook(turn, *facts)
        except Exception:
            log.exception("a hook of a feature failed", extra=turn.about)
