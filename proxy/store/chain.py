"""The audit's chain: every row holds the hash of the one before it, so no row can be changed, taken out or put between.

A row's hash is SHA-256 over a JSON array of all its fields and the hash before it. There is one chain for each tenant,
and one of tenant ``""`` for what concerns everybody. Facts are numbers, digests and words of Weir's or the operator's
own; a text that could be anybody's is replaced by its digest.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Literal, NamedTuple

import msgspec

FORM = 1
GENESIS = bytes(32)
OPERATOR = ""
PLAIN = re.compile(r"[A-Za-z0-9_.:+,-]{0,64}")
_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False)


class AuditType(StrEnum):
    EVICTION = "eviction"
    COMPACTION = "compaction"
    ROLLOVER = "rollover"
    RESUME = "resume"
    SAVE = "save"
    BUDGET_VIOLATION = "budget_violation"
    BUDGET_WARNING = "budget_warning"
    PRESSURE_CHANGE = "pressure_change"
    REFUSED = "refused"
    WANT = "want"
    ROLLBACK = "rollback"
    PIN = "pin"
    NOTE = "note"
    ALERT = "alert"
    CLOSE = "close"
    DELETE = "delete"
    POLICY_CHANGE = "policy_change"
    KEY_CHANGE = "key_change"
    SEAL = "seal"


class AuditEvent(msgspec.Struct, frozen=True):
    """Something that is to be remembered for good; ``conversation`` and ``branch`` are ids, empty for none.

    ``request`` is the id of the request that it happened in; ``sealed`` is the last row that a seal stands for, 0 for
    all other events.
    """

    tenant: str
    at: float
    type: AuditType
    conversation: str = ""
    branch: str = ""
    request: str = ""
    sealed: int = 0
    facts: Mapping[str, object] = msgspec.field(default_factory=dict)


class AuditRow(msgspec.Struct, frozen=True):
    tenant: str
    seq: int
    at: float
    type: str
    conversation: str
    branch: str
    request: str
    sealed: int
    facts: str
    prev: bytes
    hash: bytes

    @property
    def head(self) -> str:
        return head_text(self.seq, self.hash)

    @property
    def told(self) -> object:
        try:
            return json.loads(self.facts)
        except ValueError:
            return self.facts


def head_text(seq: int, link: bytes) -> str:
    return f"{seq}:{link.hex()}"


def linked(events: Iterable[AuditEvent], *, seq: int, prev: bytes) -> list[AuditRow]:
    rows: list[AuditRow] = []
    for event in events:
        seq += 1
        told = (event.conversation, event.branch, event.request, event.sealed, _ENCODER.encode(harmless(event.facts)))
        fields = (event.tenant, seq, float(event.at), str(event.type), *told, prev)
        prev = hash_of(*fields)
        rows.append(AuditRow(*fields, prev))
    return rows


def hash_of(*fields: object) -> bytes:
    """32 bytes over the fields of a row in the order of :class:`AuditRow`, the last one being the hash before it.

    Fields of other types than a row has give other hashes, or TypeError where JSON has none.
    """
    *own, prev = fields
    if not isinstance(prev, bytes):
        raise TypeError("the hash before a row is bytes")
    return sha256(json.dumps([FORM, *own, prev.hex()], separators=(",", ":")).encode("ascii")).digest()


def harmless(value: object) -> object:
    """The same as plain data in which every text is a number's or a word's spelling, others being their SHA-256."""
    if isinstance(value, str):  # what there is most of comes first, and abstract classes last: they are slow to ask
        return _word(str(value))
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict | Mapping):
        return {_word(str(name)): harmless(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [harmless(each) for each in value]
    return _word(str(value))


def _word(text: str) -> str:
    return text if PLAIN.fullmatch(text) else digest_of(text)


def digest_of(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def name_digest(tenant: str, name: str) -> str:
    return digest_of(f"{tenant}\0{name}")


class Broken(msgspec.Struct, frozen=True):
    seq: int
    kind: Literal["edited", "missing", "inserted", "reordered"]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one chain.

    Attributes:
        rows: how many there are; ``good`` how many of them, from the first on, are what was written.
        sealed: the last row that was taken out under a seal, 0 for none.
        head: number and hash of the last good row, by which a chain that was cut short is found later.
        found: which of the heads that were looked for are in it.
    """

    tenant: str
    rows: int
    good: int
    sealed: int = 0
    head: str = ""
    broken: Broken | None = None
    found: frozenset[bytes] = frozenset()


class VerifiedChains(NamedTuple):
    chains: list[Verified]
    unguarded: list[str]
