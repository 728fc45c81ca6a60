"""What summaries took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the summaries of one request took; a shared call is counted where it was made.

    Attributes:
        calls: made for this request; ``shared`` were waited for, ``kept`` answers were known already.
        asked: tokens of the prompts as reported, ``cached`` of them read from a cache, ``answered`` of the answers.
        seconds: in calls and in waiting for others', added up.
        dollars: list price of the calls whose model has one.
    """

    calls: int = 0
    shared: int = 0
    kept: int = 0
    asked: int = 0
    answered: int = 0
    cached: int = 0
    seconds: float = 0.0
    dollars: float = 0.0

    @property
    def any(self) -> bool:
        """Whether a summariser was asked, or would have been."""
        return bool(self.calls or self.shared or self.kept)

    def __add__(self, other: "Spent") -> "Spent":
        """Both together."""
        return Spent(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})
