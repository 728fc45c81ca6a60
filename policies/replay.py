"""Applying what was decided before: the same edits on the same messages, byte for byte.

A cut applies where its exact prefix is in the chain and nothing protected would disappear in it. An edit
applies to the message with its digest and occurrence. Onto protected content it applies only if it shortened
the message while that was protected, and where the chain up to it is still the one it was made on: the same
text may come back as the newest result, and a rewound conversation reads again what was evicted later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.draft import Draft, untouched
from policies.ledger import ADDING, Cut, Edit, EditKind, Prepared
from policies.messages import Transcript, count_occurrences
from policies.notes import Note
from policies.protection import Protection

SHORTENED = frozenset({EditKind.INGEST_CAP, EditKind.CLIP})
REWRITTEN = 4  # clients rewrite, drop or ask again for their last few messages


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier requests of the conversation left: edits by key, cuts oldest first.

    ``length`` is the number of messages after the head that an earlier request has sent already. ``prepared`` is a
    summary that waits for the next batch, ``checkpoint`` the newest state that was saved, when the conversation had
    ``checkpoint_length`` messages, and ``resumed`` that of
    another conversation which this one goes on from, both as JSON text; ``wanted`` is what an operator asked of the
    next request. ``version`` is the branch's; ``notes`` are those that were taken of the conversation.
    """

    edits: Mapping[tuple[bytes, int], Edit] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    length: int = 0
    prepared: Prepared | None = None
    checkpoint: str | None = None
    checkpoint_length: int = 0
    resumed: str | None = None
    wanted: str | None = None
    version: int = 0
    notes: tuple[Note, ...] = ()

    def at(self, length: int) -> "Known":
        """What was known when the conversation had ``length`` messages after the head, or a few more.

        A client that begins anew from an early point is sent what it was sent then, not what was taken out later.
        """
        length += REWRITTEN
        later = [e for e in self.edits.values() if e.length > length]
        too_new = self.checkpoint is not None and self.checkpoint_length > length
        if not later and not too_new and all(cut.length <= length for cut in self.cuts):
            return self
        gone = {e.key for e in later}
        return replace(
            self,
            edits={key: e for key, e in self.edits.items() if key not in gone},
            cuts=tuple(cut for cut in self.cuts if cut.length <= length),
            checkpoint=None if too_new else self.checkpoint,
        )

    @property
    def triggered(self) -> bool:
        """Whether a trigger has fired in this conversation."""
        return bool(self.edits or self.cuts)

    @property
    def pins(self) -> frozenset[bytes]:
        """The first bytes of the digests of messages that an operator has pinned."""
        return frozenset(e.digest for e in self.edits.values() if e.kind is EditKind.PIN)

    @property
    def next_version(self) -> int:
        """The version that the next batch will have."""
        return max(self.version, self.cuts[-1].version if self.cuts else 0) + 1


def applicable_cut(transcript: Transcript, cuts: tuple[Cut, ...], protection: Protection) -> Cut | None:
    """The newest cut whose prefix is there and that hides nothing protected."""
    head = transcript.head
    chain = transcript.chain
    guarded = protection.all if cuts else frozenset()
    for cut in reversed(cuts):
        if not 0 < cut.covers <= len(chain) or chain[cut.covers - 1] != cut.prefix:
            continue
        hidden = set(range(head, head + cut.covers)) - {head + p for p in (*cut.before, *cut.after)}
        if not hidden & guarded:
            return cut
    return None


def replay(transcript: Transcript, known: Known, protection: Protection) -> Draft:
    """The client's array with every known edit and the newest applicable cut applied."""
    if not known.edits and not known.cuts:
        return untouched(transcript)
    cut = applicable_cut(transcript, known.cuts, protection)
    draft = _replayed(transcript, known, protection, cut=cut)
    added = sum(p.tokens for p in draft.pieces if p.kind is EditKind.RECALL)
    if cut is not None and cut.origin == "resume":
        added += cut.tokens
    if draft.tokens - added > transcript.tokens:  # what the summary stood for was longer than what is there now
        return _replayed(transcript, known, protection, cut=None)
    return draft


def _replayed(transcript: Transcript, known: Known, protection: Protection, *, cut: Cut | None) -> Draft:
    draft = _with_cut(transcript, cut)
    return _without_tools(_with_edits(draft, known.edits, protection), known) if known.edits else draft


def _without_tools(draft: Draft, known: Known) -> Draft:
    """The draft without the definitions that were pruned, but with one that is asked for by name."""
    if not draft.transcript.tools or not any(e.kind is EditKind.PRUNE_TOOLS for e in known.edits.values()):
        return draft
    tools = draft.transcript.read_tools()
    return draft.with_tools_pruned(
        [d for d in tools.definitions if (d.digest, 0) in known.edits and d.name not in tools.chosen]
    )


def _with_cut(transcript: Transcript, cut: Cut | None) -> Draft:
    draft = untouched(transcript)
    return draft if cut is None else replace(draft.with_cut(cut), cut=None)


def tokens_kept_verbatim(transcript: Transcript, known: Known, protection: Protection) -> int:
    """Uncalibrated tokens of the messages that stay word for word, as known edits have left them."""
    occurrences = transcript.occurrences or count_occurrences(transcript.messages)
    total = 0
    for index in protection.verbatim:
        edit = known.edits.get((transcript.messages[index].digest, occurrences[index]))
        holds = edit is not None and edit.kind not in ADDING and _holds(transcript, index, edit, protection)
        total += edit.tokens if edit is not None and holds else transcript.messages[index].tokens
    return total


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
        if edit is None or edit.kind is EditKind.PIN:
            continue
        if index in guarded and not _holds(transcript, index, edit, protection):
            continue
        if edit.kind is EditKind.REASONING and index > (protection.current or 0):
            continue  # the turn is open again: what the model thought in it has to go back
        found[index] = edit
    return draft.with_edits(found, new=False)


def _holds(transcript: Transcript, index: int, edit: Edit, protection: Protection) -> bool:
    """Whether an edit still stands on a message that is protected now."""
    position = index - transcript.head
    if edit.kind is EditKind.RECALL:
        return True
    if edit.kind not in SHORTENED or (edit.kind is not EditKind.CLIP and index in protection.pinned):
        return False
    return position >= 0 and bool(edit.chain) and transcript.chain[position] == edit.chain
