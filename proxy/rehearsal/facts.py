"""Which facts that a request needs stand in what was forwarded, and which could be fetched from the archive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies import Piece
from proxy.rehearsal.recordings import Fact
from proxy.rehearsal.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Facts that requests needed, and of these: in the window, recoverable (in it or in the archive), stale.

    Only facts that stood in the client's own array are counted. ``stale`` is a superseded value in the window
    without the one that replaced it. Presence is literal, in any case of letters.
    """

    needed: int = 0
    kept: int = 0
    recoverable: int = 0
    stale: int = 0

    def __add__(self, other: "Retention") -> "Retention":
        return Retention(
            needed=self.needed + other.needed,
            kept=self.kept + other.kept,
            recoverable=self.recoverable + other.recoverable,
            stale=self.stale + other.stale,
        )


def judge(
    script: Script, facts: Sequence[Fact], *, length: int, sent: Sequence[Piece], archived: Iterable[int]
) -> Retention:
    """What of ``facts`` is in the array ``sent`` for the first ``length`` messages; ``archived`` are originals kept."""
    if not facts:
        return Retention()
    window = "\n".join(script.piece_text(piece) for piece in sent)
    original = archive = None
    total = Retention()
    for fact in facts:
        if _stands(fact, window):
            total += Retention(needed=1, kept=1, recoverable=1)
            continue
        if original is None or archive is None:
            original = "\n".join(script.text(index) for index in range(length))
            archive = "\n".join((window, *(script.text(index) for index in sorted(archived))))
        if _stands(fact, original):
            stale = any(value.lower() in window for value in fact.superseded)
            total += Retention(needed=1, recoverable=int(_stands(fact, archive)), stale=int(stale))
    return total


def _stands(fact: Fact, text: str) -> bool:
    return all(needle.lower() in text for needle in fact.needles)
