"""The moments of a recorded conversation at which a policy took something out, each with what there was before."""

from collections.abc import Iterator
from dataclasses import dataclass

from policies import Piece, ToolCall
from policies.fidelity import Contexts, contexts_of
from policies.ledger import Cut
from proxy.rehearsal.lanes import Lane
from proxy.rehearsal.recordings import Recording
from proxy.rehearsal.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """One batch: the whole conversation and what went up in its place.

    ``request`` is the number of messages of the request, 0 for a pair out of the archive. ``facts`` are those that
    the conversation still needs then, ``later`` the calls that it goes on to make, ``archived`` the text of the
    originals that were kept, ``asked`` how often the policy asked a model to write.
    """

    request: int
    contexts: Contexts
    facts: tuple[tuple[str, ...], ...] = ()
    later: tuple[ToolCall, ...] = ()
    archived: str = ""
    layers: tuple[str, ...] = ()
    asked: int = 0

    @property
    def recorded(self) -> tuple[str, ...]:
        """The facts that are one value each."""
        return tuple(values[0] for values in self.facts if len(values) == 1)


def compactions_of(script: Script, lane: Lane) -> Iterator[Compaction]:
    """Every batch of a lane, in order."""
    archived: set[int] = set()
    for request in script.requests:
        forwarded = lane.forward(script, request.length)
        archived |= set(forwarded.removed)
        if not forwarded.new or forwarded.pieces is None:
            continue
        length = request.length
        last = len(script.recording.values)
        yield Compaction(
            request=length,
            contexts=contexts_of(script.transcript(length), forwarded.pieces),
            facts=tuple(fact.needles for fact in script.recording.facts if _is_needed(fact.needed_at, length)),
            later=tuple(call for index in range(length, last) for call in script.read(index).calls),
            archived="\n".join(script.text(index) for index in sorted(archived)),
            layers=forwarded.layers,
            asked=forwarded.asked,
        )


def _is_needed(at: tuple[int, ...], length: int) -> bool:
    return not at or any(index >= length for index in at)


def archived_pair(recording: Recording, cut: Cut, *, script: Script) -> Compaction:
    """A summary out of the archive beside the originals that it stands for, which are all of ``recording``."""
    pieces = (Piece(None, cut.tokens, cut.text),)
    length = len(recording.values)
    return Compaction(
        request=0,
        contexts=contexts_of(script.transcript(length), pieces),
        archived="\n".join(script.text(index) for index in range(length)),
        layers=(cut.layer,),
    )
