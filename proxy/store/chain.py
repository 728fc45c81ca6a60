"""The audit's rows and their chain: each row holds the hash of the one before it.

A row's hash is SHA-256 over a JSON array of all its fields and the hash before it. There is one
chain for each tenant, and one of tenant ``""`` for what concerns everybody. Facts are numbers,
digests and words of Weir's or the operator's own; any other text is replaced by its digest.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256

import msgspec

FORM = 2
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


class AuditEvent(msgspec.Struct, frozen=True):
    """What is to be recorded; ``conversation``, ``branch`` and ``request`` are ids, empty
    for none.
    """

    tenant: str
    at: float
    type: AuditType
    conversation: str = ""
    branch: str = ""
    request: str = ""
    facts: Mapping[str, object] = msgspec.field(default_factory=dict)


class AuditRow(msgspec.Struct, frozen=True):
    """One row. ``seq`` counts from 1 in each chain, ``prev`` is the hash of the row before, 32 zero
    bytes for none.
    """

    tenant: str
    seq: int
    at: float
    type: str
    conversation: str
    branch: str
    request: str
    facts: str
    prev: bytes
    hash: bytes

    @property
    def told(self) -> object:
        try:
            return json.loads(self.facts)
        except ValueError:
            return self.facts


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one chain.

    Attributes:
        first: number of the first row that is kept; retention may have removed those before it.
        last: number of the last good row, ``head`` its hash in hex; 0 and empty where there is
            none.
        broken: number of the first row that does not follow from the one before it, None if all do.
    """

    tenant: str
    first: int = 0
    last: int = 0
    head: str = ""
    broken: int | None = None


def linked(events: Iterable[AuditEvent], *, seq: int, prev: bytes) -> list[AuditRow]:
    """The rows of these events after row ``seq``, whose hash is ``prev``."""
    rows: list[AuditRow] = []
    for event in events:
        seq += 1
        facts = _ENCODER.encode(harmless(event.facts))
        ids = (event.conversation, event.branch, event.request)
        row = AuditRow(event.tenant, seq, float(event.at), str(event.type), *ids, facts, prev, b"")
        prev = hash_of(row)
        rows.append(msgspec.structs.replace(row, hash=prev))
    return rows


def hash_of(row: AuditRow) -> bytes:
    """32 bytes over all of a row's other fields. Raises TypeError or ValueError for a value that no
    row may hold.
    """
    *fields, prev, _ = msgspec.structs.astuple(row)
    return sha256(
        json.dumps([FORM, *fields, prev.hex()], separators=(",", ":")).encode("ascii")
    ).digest()


def harmless(value: object) -> object:
    """The same as plain data in which every text is a number's or a word's spelling, others being
    their SHA-256.
    """
    # what there is most of comes first, and abstract classes last: their checks are slow
    if isinstance(value, str):
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
