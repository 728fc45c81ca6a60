"""Applying what was decided before: the same edits on the same messages, byte for byte.

A cut applies where its exact prefix is in the chain and nothing protected would disappear in it. An edit
applies to the message with its digest and occurrence. Onto protected content it applies only where the
chain up to that message is still the one it was made on: the same text may come back as the newest result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.draft import Draft, untouched
from policies.ledger import Cut, Edit
from policies.messages import Transcript, count_occurrences
from policies.protection import Protection


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier requests of the conversation left: edits by key, cuts oldest first.

    ``length`` is the number of messages after the head that an earlier request has sent already.
    """

    edits: Mapping[tuple[bytes, int], Edit] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    length: int = 0

    @property
    def triggered(self) -> bool:
        """Whether a trigger has fired in this conversation."""
        return bool(self.edits or self.cuts)


def applicable_cut(transcript: Transcript, cuts: tuple[Cut, ...], protection: Protection) -> Cut | None:
    """The newest cut whose prefix is there and that hides nothing protected."""
    head = transcript.head
    chain = transcript.chain
    for cut in reversed(cuts):
        if not 0 < cut.covers <= len(chain) or chain[cut.covers - 1] != cut.prefix:
            continue
        hidden = set(range(head, head + cut.covers)) - {head + p for p in (*cut.before, *cut.after)}
        needed = protection.active | {i for i in (protection.task, protection.current) if i is not None}
        if not hidden & (needed | protection.head):
            return cut
    return None


def replay(transcript: Transcript, known: Known, protection: Protection) -> Draft:
    """The client's array with every known edit and the newest applicable cut applied."""
    if not known.edits and not known.cuts:
        return untouched(transcript)
    draft = _with_cut(transcript, applicable_cut(transcript, known.cuts, protection))
    return _with_edits(draft, known.edits, protection) if known.edits else draft


def _with_cut(transcript: Transcript, cut: Cut | None) -> Draft:
    draft = untouched(transcript)
    return draft if cut is None else replace(draft.with_cut(cut), cut=None)


def _with_edits(draft: Draft, edits: Mapping[tuple[bytes, int], Edit], protection: Protection) -> Draft:
    transcript = draft.transcript
    occurrences = transcript.occurrences or count_occurrences(transcript.messages)
    guarded = protection.all
    found: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None:
            continue
        edit = edits.get((transcript.messages[index].digest, occurrences[index]))
        if edit is None:
            continue
        if index in guarded and not _same_history(transcript, index, edit):
            continue
        found[index] = edit
    return draft.with_edits(found, new=False)


def _same_history(transcript: Transcript, index: int, edit: Edit) -> bool:
    position = index - transcript.head
    return position >= 0 and bool(edit.chain) and transcript.chain[position] == edit.chain
