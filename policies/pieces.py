"""One message of the array that is being planned."""

from dataclasses import dataclass

from policies.ledger import EditKind


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of the planned array.

    ``index`` points at the client's message, None for what is Weir's own: a summary, or (of kind ``recall``) what was
    brought back. ``text`` replaces its content; None
    keeps the client's bytes. ``kind`` says which edit replaced it.
    """

    index: int | None
    tokens: int
    text: str | None = None
    kind: EditKind | None = None

    @property
    def is_summary(self) -> bool:
        """Whether it stands for what a cut covers."""
        return self.index is None and self.kind is None
