"""A conversation: what its client calls it, its threads while the process lives, and a request's
place in one.

A conversation has a name that a client gave, or a generated id. A :class:`Thread` is one line of
its history: a title request, the main loop and sub-agents under one name are several. A
:class:`View` is what was decided on a thread for one believed window. Names are those of the
conventions that are in use, in order.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from policies.ledger import EVERY_WINDOW, NOTHING, ConversationState, Ledger, Trend, begun
from policies.messages import HASH_SIZE, Message, Transcript, extend_chain
from proxy.store.records import Branch, Change
from proxy.wire.raw import Raw, read_value

UNKNOWN = Trend()
# aider's two messages about files, its rules after the newest message, and that message
REWRITTEN_END = 4
TAIL = 24
"""Messages at the end of a request that are searched for those that the client moves."""
MAX_FLOATING = 16
GENERATED = "conv-"
OWN_DIGITS = 20
RESUMED_DIGITS = 8
"""Of the id of a conversation without a name: its own, followed by those of what it resumes."""
OWN_SIZE = 4_096
"""Bytes that a thread takes in memory without the texts that were decided on."""
BESIDE_TEXT = 512
BYTES_OF_A_CHARACTER = 2
"""Bytes a character, of a text in which one is beyond Latin-1, as the ellipsis of an extract is."""
OWN_HEADER = b"x-weir-conversation"
RESUME_HEADER = b"x-weir-resume"
PARENT_HEADER = b"x-weir-parent"
MEMORY_HEADER = b"x-weir-memory"
_VALID = re.compile(r"[\x21-\x7e]{1,256}")
_SESSION_HEADER = re.compile(rb"x-[a-z0-9-]{1,64}-session-id")
_NOT_A_SESSION = frozenset({b"x-parent-session-id"})
_CODEX = re.compile(r"codex[_-]", re.IGNORECASE)
_NAMING = (
    OWN_HEADER,
    b"x-conversation-id",
    b"x-session-id",
    b"x-litellm-session-id",
    b"helicone-session-id",
    b"x-claude-code-session-id",
    b"x-opencode-session",
)
_METADATA_KEYS = ("conversation_id", "session_id", "thread_id", "chat_id")
_BAGGAGE_KEYS = ("gen_ai.conversation.id", "session.id")

Owner = tuple[str, ...]
"""Whose history a request's is, in addition to its tenant: unnamed, of a name, or of what it
resumes.
"""


def owner_of(name: str | None, resumes: str | None) -> Owner:
    if name is not None:
        return ("name", name)
    return () if resumes is None else ("resume", _digits_of(resumes))


def owner_by(generated: str) -> Owner | None:
    """Whose history it is, by the id that Weir gave to a conversation without a name; None where it
    is no such id.
    """
    digits = generated.removeprefix(GENERATED)
    if digits == generated or len(digits) not in (OWN_DIGITS, OWN_DIGITS + RESUMED_DIGITS):
        return None
    resumed = digits[OWN_DIGITS:]
    return ("resume", resumed) if resumed else ()


def _digits_of(resumes: str) -> str:
    return blake2b(resumes.encode(), digest_size=RESUMED_DIGITS // 2).hexdigest()


class Prefix(NamedTuple):
    """What the last request that an upstream accepted began with.

    Attributes:
        head: a hash of its system messages, ``tools`` of its tool definitions, both as the client
            sent them.
        end: the chain's hash after its ``length`` messages after the head.
        pruned: names of the tools whose definitions were left out.
        hit_ratio: share of it that was read from the provider's cache, None where that was not
            reported.
        is_stale: whether Weir has changed it since, for a request that was not accepted.
    """

    head: bytes
    tools: bytes
    end: bytes
    length: int
    pruned: tuple[str, ...] = ()
    hit_ratio: float | None = None
    is_stale: bool = False


@dataclass(slots=True)
class View:
    """What was decided on a thread for one believed ``window``, in tokens, and how its requests
    have grown.

    ``shadow`` is the ledger of a conversation that is only observed: what would be decided if its
    plans were carried out. ``prefix`` is what the provider's cache may hold, None where this
    process has sent nothing of it yet.
    """

    window: int
    ledger: Ledger = NOTHING
    trend: Trend = UNKNOWN
    shadow: Ledger | None = None
    prefix: Prefix | None = None

    def decided(self, *, observed: bool = False) -> Ledger:
        return self.shadow if observed and self.shadow is not None else self.ledger

    def follow(self, trend: Trend) -> None:
        self.trend = trend._replace(window=self.window)


@dataclass(slots=True)
class Thread:
    """One thread while the process lives: what is known, and the lock that lets one request at a
    time edit it.

    ``known`` is what holds in every view. ``has_notes`` says that the stored notes are among it,
    ``above`` that the last request's pressure was where states are saved, ``read`` is how many of
    its messages were read for the batch to come, ``failed`` how many there were when one was
    prepared that was of no use, else 0, ``preparing`` is set once the summary is there that is
    being prepared, None while none is, and ``health`` is what the store has of the conversation's
    health and nobody has taken over yet, as JSON. ``stored`` says that the store has had it,
    ``inspected`` how many messages of its requests were given to the inspection store, ``still``
    what was read of the first of its requests that seem to be cut in silence, and what was sent.
    ``tail`` are the digests of the newest messages of the last request, as one text, and ``before``
    the hash of the history in front of them. ``opening`` lets one request at a time open a view,
    ``dropped`` are the windows of those that the store alone has.
    """

    branch: Branch
    parent: str | None = None
    stored: bool = False
    known: ConversationState = field(init=False)
    views: dict[int, View] = field(init=False)
    floating: tuple[bytes, ...] = field(init=False)
    health: str | None = field(init=False)
    longest: int = field(init=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    dropped: set[int] = field(default_factory=set)
    has_notes: bool = False
    above: bool = False
    read: int = 0
    failed: int = 0
    preparing: "asyncio.Event | None" = None
    inspected: int = 0
    still: tuple[int, int] | None = None
    tail: bytes = b""
    before: bytes = b""
    _size: int = 0
    _sized: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        branch = self.branch
        self.known = branch.known
        self.longest = branch.longest
        self.health = branch.health
        self.floating = branch.floating
        self.views = {
            window: View(window, ledger) for window, ledger in branch.views.items() if window
        }
        self._follow(branch.trend)

    @property
    def size(self) -> int:
        """About how many bytes it takes; worked out anew once something was decided, saved or
        noted.
        """
        known = self.known
        ledgers = [view.ledger for view in self.views.values()]
        now = (known, *map(id, ledgers))
        if self._sized != now:
            texts = [cut.text for ledger in ledgers for cut in ledger.cuts]
            texts += [edit.text for ledger in ledgers for edit in ledger.edits.values()]
            texts += [known.checkpoint or "", known.resumed or ""]
            self._size = OWN_SIZE + sum(
                BESIDE_TEXT + BYTES_OF_A_CHARACTER * len(text) for text in texts
            )
            self._sized = now
        return self._size

    def ends(self, transcript: Transcript) -> tuple[bytes, ...]:
        return transcript.chain[-1:]

    def tips(self, transcript: Transcript) -> tuple[tuple[bytes, int], ...]:
        """The same with their lengths, and those before its newest user messages, which some
        clients rewrite later.
        """
        chain = transcript.chain
        messages = transcript.messages
        head = len(messages) - len(chain)
        whole = len(chain)
        before = (
            n
            for n in range(max(1, whole - REWRITTEN_END), whole)
            if messages[head + n].role == "user"
        )
        return tuple((chain[length - 1], length) for length in (*before, whole) if length > 0)

    def ledgers(self) -> dict[int, Ledger]:
        pinned = (
            {EVERY_WINDOW: self.branch.views[EVERY_WINDOW]}
            if EVERY_WINDOW in self.branch.views
            else {}
        )
        return pinned | {window: view.ledger for window, view in self.views.items()}

    def known_at(self, view: View, length: int, *, observed: bool = False) -> ConversationState:
        """What to replay on a request of which ``length`` messages were sent; for an observed one
        what would be.
        """
        decided = view.decided(observed=observed)
        return replace(
            self.known,
            edits=decided.edits,
            cuts=decided.cuts,
            length=length,
            version=self.branch.version,
        )

    def apply(self, change: Change, version: int) -> None:
        """Remember a change that is now ``version``; what was only observed starts anew from it.

        After a cut the prepared summary that its plan knew is dropped; one that was made meanwhile
        is for the next.
        """
        for view in self.views.values():
            if change.window in (view.window, EVERY_WINDOW) and (
                change.edits or change.cut is not None
            ):
                view.ledger = view.ledger.with_batch(change.edits, change.cut)
                view.shadow = None
        if change.window == EVERY_WINDOW:
            pinned = self.branch.views.get(EVERY_WINDOW, NOTHING).with_batch(change.edits, None)
            self.branch = msgspec.structs.replace(
                self.branch, views={**self.branch.views, EVERY_WINDOW: pinned}
            )
        waits = change.cut is None or self.known.prepared != change.prepared
        self.known = replace(
            self.known, wanted=None, prepared=self.known.prepared if waits else None
        )
        self.save(change.checkpoint, version, length=change.length)

    def save(self, checkpoint: str | None, version: int, *, length: int) -> None:
        self.branch = msgspec.structs.replace(self.branch, version=version)
        if checkpoint is not None:
            self.known = replace(self.known, checkpoint=checkpoint, checkpoint_length=length)

    def refresh(self, branch: Branch) -> None:
        self.branch = branch
        self.known = replace(branch.known, notes=self.known.notes)
        self.health = branch.health
        for window in {*self.views, *branch.views} - {EVERY_WINDOW}:
            view = self.views.setdefault(window, View(window))
            view.ledger = (
                branch.views[window] if window in branch.views else begun(branch.views, window)
            )
            view.shadow = None
        self._follow(branch.trend)

    def catch_up(self, branch: Branch) -> None:
        if self.branch.version < branch.version:
            self.refresh(branch)
        elif (
            branch.known.prepared not in (None, self.known.prepared)
            or branch.known.wanted != self.known.wanted
        ):
            prepared = branch.known.prepared or self.known.prepared
            self.known = replace(self.known, prepared=prepared, wanted=branch.known.wanted)
        self.longest = branch.longest
        self.floating = branch.floating or self.floating
        self._follow(branch.trend)
        self.health = branch.health
        self.has_notes = False

    def _follow(self, trend: Trend | None) -> None:
        """Take over how the requests of one window have grown, as far as other processes have seen
        more of them.
        """
        if trend is None:
            return
        for view in self.views.values():
            if trend.window in (view.window, EVERY_WINDOW) and (trend.at or 0.0) > (
                view.trend.at or 0.0
            ):
                view.follow(trend)

    def remember(self, transcript: Transcript) -> None:
        """Remember what a request ended with, to know what its client moves from one to the
        next.
        """
        lasting = transcript.lasting[-TAIL:]
        self.longest = len(transcript.chain)
        self.tail = b"".join([transcript.messages[index].digest for index in lasting])
        first = lasting[0] - transcript.head if lasting else 0
        self.before = transcript.chain[first - 1] if first > 0 else b""

    def fitted(self, transcript: Transcript, seed: bytes) -> tuple[Transcript, int]:
        """The request without what its client moves, and how many of its messages are known by what
        was moved now.

        ``seed`` is that of the transcript's chain.
        """
        known = set(self.floating)
        found = _without(transcript, known, seed) if known else transcript
        moved, length = _moved(found, self.tail, self.before) if self.tail else ((), 0)
        if moved:
            self.floating = (*self.floating, *(each for each in moved if each not in known))[
                -MAX_FLOATING:
            ]
            found = _without(transcript, known.union(moved), seed)
        return found, length


class Match(NamedTuple):
    """The thread that a request belongs to, its transcript, and how many of its messages an earlier
    one has sent.
    """

    thread: Thread
    transcript: Transcript
    length: int

    def like(self, transcript: Transcript) -> Transcript:
        """Another reading of the same request, with the same history."""
        return replace(transcript, chain=self.transcript.chain, floating=self.transcript.floating)


def new_thread(
    tenant: str, conversation: str | None, name: str | None, resumes: str | None
) -> Thread:
    unique = secrets.token_hex(OWN_DIGITS // 2)
    resumed = _digits_of(resumes) if name is None and resumes is not None else ""
    conversation = conversation or f"{GENERATED}{unique}{resumed}"
    branch = Branch(
        tenant=tenant,
        conversation=conversation,
        name=name or conversation,
        branch=f"br-{unique}",
        version=0,
    )
    return Thread(branch)


def _without(transcript: Transcript, digests: AbstractSet[bytes], seed: bytes) -> Transcript:
    """The transcript whose history is without the messages of these digests; ``seed`` is that of
    its hashes.
    """
    messages = transcript.messages
    head = transcript.head
    floating = frozenset(i for i in range(head, len(messages)) if messages[i].digest in digests)
    if floating == transcript.floating or len(floating) == len(messages) - head:
        return transcript
    link = seed
    chain = list[bytes]()
    for index in range(head, len(messages)):
        if index not in floating:
            link = extend_chain((link,), messages[index : index + 1])[-1]
        chain.append(link)
    return replace(transcript, chain=tuple(chain), floating=floating)


def _moved(transcript: Transcript, tail: bytes, before: bytes) -> tuple[tuple[bytes, ...], int]:
    """The digests of what its client has moved, inserted or replaced since the last request, of
    which ``tail`` are the newest digests and ``before`` the hash in front of them, and how many
    other messages are unchanged.

    Nothing where the rest of the history has changed: then the client has edited it.
    """
    said = [tail[at : at + HASH_SIZE] for at in range(0, len(tail), HASH_SIZE)]
    places = transcript.lasting
    start = 0
    if before:
        links = {
            transcript.chain[index - transcript.head]: place for place, index in enumerate(places)
        }
        if before not in links:
            return (), 0
        start = links[before] + 1
    now = [transcript.messages[index] for index in places[start:]]
    found = dict[bytes, None]()
    was = is_ = 0
    while was < len(said) and is_ < len(now):
        old = said[was]
        new = now[is_]
        after_old = said[was + 1] if was + 1 < len(said) else b""
        after_new = now[is_ + 1].digest if is_ + 1 < len(now) else b""
        distance = len(said) - was
        there = now[-distance] if is_ < len(now) - distance else None
        if old == new.digest:
            was += 1
            is_ += 1
        elif old in found:
            was += 1
        elif new.digest in found:
            is_ += 1
        elif there is not None and there.digest == old and _has_moved(there, distance, instead=new):
            found[old] = None
            was += 1
        elif there is not None and after_old == new.digest and _is_in_its_place(there, said):
            found |= {old: None, there.digest: None}
            was += 1
        elif _may_move(new) and new.role != "assistant" and after_new == old:
            found[new.digest] = None
            is_ += 1
        elif new.is_head and after_old and after_new == after_old:
            found |= {old: None, new.digest: None}
            was += 1
            is_ += 1
        else:
            break
    left = [digest for digest in said[was:] if digest not in found]
    if not found or len(left) > REWRITTEN_END:
        return (), 0
    return tuple(found), places[start + is_ - 1] - transcript.head + 1 if start + is_ else 0


def _has_moved(there: Message, distance: int, *, instead: Message) -> bool:
    """Whether the message at its old distance from the end is the one of the last request, with
    another ``instead``.

    A user who says something else first, and then the same word again, has not moved it.
    """
    return _may_move(there) and (distance > 1 or not there.role == instead.role == "user")


def _is_in_its_place(there: Message, said: Sequence[bytes]) -> bool:
    """Whether a message may replace one that was at the same distance from the end and is gone."""
    return there.is_head or (there.role == "user" and _may_move(there) and there.digest not in said)


def _may_move(message: Message) -> bool:
    return not message.is_result and not message.call_ids


def inherited(ledger: Ledger, transcript: Transcript) -> Ledger:
    """What a fork takes over: every edit, and the cuts whose prefix it shares."""
    return Ledger(
        ledger.edits, tuple(c for c in ledger.cuts if transcript.begins_with(c.covers, c.prefix))
    )


def state_of_fork(known: ConversationState, length: int) -> ConversationState:
    """What a fork that shares ``length`` messages takes over, in addition to the decisions."""
    same = known.checkpoint is not None and known.checkpoint_length <= length
    return ConversationState(
        prepared=known.prepared,
        checkpoint=known.checkpoint if same else None,
        checkpoint_length=known.checkpoint_length if same else 0,
        resumed=known.resumed,
        notes=known.notes,
    )


def name_from(
    headers: Sequence[tuple[bytes, bytes]], fields: Mapping[str, Raw], *, baggage: bool = False
) -> str | None:
    """The client's name for the conversation, None if it sends none that is valid; ``baggage`` may
    hold one.
    """
    sent = dict(headers)
    for name in _NAMING:
        if name in sent and (found := _valid(sent[name])):
            return found
    for name, value in headers if b"-session-id" in b" ".join(sent) else ():
        if (
            _SESSION_HEADER.fullmatch(name)
            and name not in _NOT_A_SESSION
            and (found := _valid(value))
        ):
            return found
    found = _from_body(fields) or _from_codex(sent)
    return found or (_from_baggage(sent.get(b"baggage", b"")) if baggage else None)


def conversation_in(headers: Sequence[tuple[bytes, bytes]], header: bytes) -> str | None:
    return next((_valid(value) for name, value in headers if name == header), None)


def _valid(value: object) -> str | None:
    text = value.decode("latin-1").strip() if isinstance(value, bytes) else value
    return text if isinstance(text, str) and _VALID.fullmatch(text) else None


def _from_body(fields: Mapping[str, Raw]) -> str | None:
    for key in ("session_id", "conversation", "litellm_session_id"):
        if key in fields:
            value = read_value(fields[key])
            found = _valid(value.get("id") if isinstance(value, dict) else value)
            if found:
                return found
    metadata = read_value(fields["metadata"]) if "metadata" in fields else None
    if not isinstance(metadata, dict):
        return None
    for key in _METADATA_KEYS:
        if found := _valid(metadata.get(key)):
            return found
    return _from_user_id(metadata.get("user_id"))


def _from_user_id(user_id: object) -> str | None:
    if not isinstance(user_id, str):
        return None
    _, found, session = user_id.rpartition("_session_")
    if found:
        return _valid(session)
    try:
        value = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    return _valid(value.get("session_id")) if isinstance(value, dict) else None


def _from_codex(sent: Mapping[bytes, bytes]) -> str | None:
    if _CODEX.match(sent.get(b"user-agent", b"").decode("latin-1")):
        for name in (b"session-id", b"thread-id", b"session_id", b"conversation_id"):
            if name in sent and (found := _valid(sent[name])):
                return found
    return _valid(sent[b"x-session-affinity"]) if b"x-session-affinity" in sent else None


def _from_baggage(baggage: bytes) -> str | None:
    entries = dict(e.split("=", 1) for e in baggage[:8192].decode("latin-1").split(",") if "=" in e)
    members = {k.strip(): unquote(v.split(";", 1)[0].strip()) for k, v in entries.items()}
    return next((found for key in _BAGGAGE_KEYS if (found := _valid(members.get(key)))), None)
