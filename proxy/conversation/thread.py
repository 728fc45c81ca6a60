"""A conversation: what its client calls it, a branch of it while the process lives, and a request's place in that.

Names are those of the conventions that are in use, in order. A name only labels. It never selects state by itself:
several clients send one id for their title request, main loop and compaction, and most send none.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from policies.ledger import ConversationState, Cut, Edit, Trend
from policies.messages import HASH_SIZE, Transcript
from proxy.store.records import Branch, Change
from proxy.wire.raw import Raw, read_value

UNKNOWN = Trend()
REWRITTEN_END = 4  # aider's two messages about files, its rules behind the newest message, and that message
OWN_SIZE = 4_096
"""Bytes that a thread takes in memory without the texts that were decided on."""
BESIDE_TEXT = 512
BYTES_OF_A_CHARACTER = 2
"""Of a text in which one character is beyond Latin-1, as the ellipsis of an extract is."""
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

Door = tuple[str, ...]


class Prefix(NamedTuple):
    """What the last request that an upstream accepted began with.

    Attributes:
        head: a hash of its system messages, ``tools`` of its tool definitions, both as the client sent them.
        end: the chain's hash after its ``length`` messages behind the head.
        pruned: names of the tools whose definitions were left out.
        hit_ratio: share of it that was read from the provider's cache, None where that was not reported.
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
class Thread:
    """One branch while the process lives: what is known, and the lock that lets one request at a time edit it.

    ``shadow`` is the ledger of a conversation that is only observed: what would be known if its plans were carried
    out. ``prefix``
    is what the provider's cache may hold, None where this process has sent nothing of it yet. ``has_notes`` says that
    the stored notes are among what is known, ``above`` that the last request's pressure was where states are saved,
    ``read`` is how many of its messages were read for the batch to come, ``failed`` how many there were when
    one was prepared that was of no use, else 0, ``preparing`` is set once the summary is there that is being prepared,
    None while none is, and ``health`` is what the store has of the conversation's health and nobody has taken over yet,
    as JSON. ``doors`` are what a resumed one is kept behind, ``stored`` says that the store has had it, ``inspected``
    how many messages of its requests were given to who keeps them to be looked at, ``still`` what was read of
    the first of its requests that seem to be cut in silence, and what was sent.
    """

    branch: Branch
    parent: str | None = None
    stored: bool = False
    known: ConversationState = field(init=False)
    health: str | None = field(init=False)
    longest: int = field(init=False)
    trend: Trend = field(init=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    shadow: ConversationState | None = None
    prefix: Prefix | None = None
    has_notes: bool = False
    above: bool = False
    read: int = 0
    failed: int = 0
    preparing: "asyncio.Event | None" = None
    doors: tuple[Door, ...] = ()
    inspected: int = 0
    still: tuple[int, int] | None = None
    _size: int = 0
    _sized: ConversationState | None = None

    def __post_init__(self) -> None:
        self.known, self.longest = self.branch.known, self.branch.longest
        self.health = self.branch.health
        self.trend = self.branch.trend or UNKNOWN

    @property
    def size(self) -> int:
        """About how many bytes it takes; worked out anew once something was decided, saved or noted."""
        known = self.known
        if self._sized is not known:
            texts = [cut.text for cut in known.cuts]
            texts += [edit.text for edit in known.edits.values()]
            texts += [known.checkpoint or "", known.resumed or ""]
            self._size = OWN_SIZE + sum(BESIDE_TEXT + BYTES_OF_A_CHARACTER * len(text) for text in texts)
            self._sized = known
        return self._size

    def ends(self, transcript: Transcript) -> tuple[bytes, ...]:
        return self.behind(transcript.chain[-1:])

    def tips(self, transcript: Transcript) -> tuple[tuple[bytes, int], ...]:
        """The same with their lengths, and those before its newest user messages, which some clients rewrite later."""
        chain, messages = transcript.chain, transcript.messages
        head, whole = len(messages) - len(chain), len(chain)
        before = (n for n in range(max(1, whole - REWRITTEN_END), whole) if messages[head + n].role == "user")
        lengths = [length for length in (*before, whole) if length > 0]
        return tuple((link, length) for length in lengths for link in self.behind(chain[length - 1 : length]))

    def behind(self, links: Sequence[bytes]) -> tuple[bytes, ...]:
        if self.known.resumed is None:
            return tuple(links)
        return tuple(link_behind(door, link) for link in links for door in self.doors)

    def ledger(self, *, observed: bool) -> ConversationState:
        return self.shadow if observed and self.shadow is not None else self.known

    def known_at(self, length: int, *, observed: bool = False) -> ConversationState:
        """What to replay on a request of which ``length`` messages were sent; for an observed one what would be."""
        return replace(self.ledger(observed=observed), length=length, version=self.branch.version)

    def apply(self, change: Change, version: int) -> None:
        """Remember a change that is now ``version``; what was only observed starts anew from it.

        After a cut the prepared summary that its plan knew of waits no longer; one that came meanwhile is for the next.
        """
        known, self.shadow = _merged(self.known, change.edits, change.cut), None
        waits = change.cut is None or known.prepared != change.prepared
        self.known = replace(known, wanted=None, prepared=known.prepared if waits else None)
        self.save(change.checkpoint, version, length=change.length)

    def save(self, checkpoint: str | None, version: int, *, length: int) -> None:
        self.branch = msgspec.structs.replace(self.branch, version=version)
        if checkpoint is not None:
            self.known = replace(self.known, checkpoint=checkpoint, checkpoint_length=length)

    def observe(self, edits: Sequence[Edit], cut: Cut | None) -> None:
        self.shadow = _merged(self.ledger(observed=True), edits, cut)

    def refresh(self, branch: Branch) -> None:
        self.branch, self.known, self.shadow = branch, replace(branch.known, notes=self.known.notes), None
        self.health = branch.health
        self.follow(branch.trend)

    def catch_up(self, branch: Branch) -> None:
        if self.branch.version < branch.version:
            self.refresh(branch)
        elif branch.known.prepared not in (None, self.known.prepared) or branch.known.wanted != self.known.wanted:
            prepared = branch.known.prepared or self.known.prepared
            self.known = replace(self.known, prepared=prepared, wanted=branch.known.wanted)
        self.longest = branch.longest
        self.follow(branch.trend)
        self.health = branch.health
        self.has_notes = False

    def follow(self, trend: Trend | None) -> None:
        if trend is not None and (trend.at or 0.0) > (self.trend.at or 0.0):
            self.trend = trend


class Match(msgspec.Struct, frozen=True):
    """The thread that a request belongs to, how many of its messages an earlier one has sent, and behind which door it
    was found, None for in the open."""

    thread: Thread
    length: int
    door: Door | None = None

    @property
    def is_resumed(self) -> bool:
        return self.thread.known.resumed is not None

    def is_repeat(self, chain: Sequence[bytes]) -> bool:
        return self.is_resumed and self.thread.longest <= len(chain)


def new_thread(tenant: str, conversation: str | None, name: str | None) -> Match:
    unique = secrets.token_hex(10)
    conversation = conversation or f"conv-{unique}"
    branch = Branch(
        tenant=tenant, conversation=conversation, name=name or conversation, branch=f"br-{unique}", version=0
    )
    return Match(Thread(branch), 0)


def link_behind(door: Door, link: bytes) -> bytes:
    return blake2b(link + repr(door).encode(), digest_size=HASH_SIZE).digest()


def _merged(known: ConversationState, edits: Sequence[Edit], cut: Cut | None) -> ConversationState:
    cuts = known.cuts if cut is None else (*known.cuts, cut)
    return replace(known, edits=dict(known.edits) | {e.key: e for e in edits}, cuts=cuts)


def inherited(known: ConversationState, chain: Sequence[bytes], length: int) -> ConversationState:
    """What a fork takes over that shares ``length`` messages: every edit, and the cuts whose prefix it shares."""
    cuts = tuple(c for c in known.cuts if c.covers <= len(chain) and chain[c.covers - 1] == c.prefix)
    same = known.checkpoint is not None and known.checkpoint_length <= length
    return ConversationState(
        edits=known.edits,
        cuts=cuts,
        prepared=known.prepared,
        checkpoint=known.checkpoint if same else None,
        checkpoint_length=known.checkpoint_length if same else 0,
        resumed=known.resumed,
        notes=known.notes,
    )


def name_from(
    headers: Sequence[tuple[bytes, bytes]], fields: Mapping[str, Raw], *, baggage: bool = False
) -> str | None:
    """The client's name for the conversation, None if it sends none that is valid; ``baggage`` may hold one."""
    sent = dict(headers)
    for name in _NAMING:
        if name in sent and (found := _valid(sent[name])):
            return found
    for name, value in headers if b"-session-id" in b" ".join(sent) else ():
        if _SESSION_HEADER.fullmatch(name) and name not in _NOT_A_SESSION and (found := _valid(value)):
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
