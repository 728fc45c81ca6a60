"""What one message says by itself, read once: sentences, passages, conclusions, and what its calls ask for.

Nothing here depends on the rest of a conversation, so a caller may keep the readings: a second compaction then pays
for the messages that are new.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import blake2b

from policies.extraction.claims import Frame, frame
from policies.extraction.conclusions import Conclusion, conclusions, open_error
from policies.extraction.findings import Leaf, leaves, parse
from policies.extraction.identifiers import Kind, scan, shape
from policies.extraction.packing import EXPONENT
from policies.extraction.passages import (
    Passage,
    answer_passages,
    is_prose,
    named_by_user,
    output_passages,
    question,
    result_passages,
)
from policies.extraction.rules import RULE_THRESHOLD, Sentence, read_sentence, sentences, statements
from policies.text.segments import Source as Source

SPEAKERS = frozenset({"user", "system", "developer"})
SHOWN = "the user showed output"
DEFAULT_PIECES = 60_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One value that a call asks for, its shape ("" for plain words and numbers) and the argument's name."""

    value: str
    shape: str
    key: str


@dataclass(frozen=True, slots=True)
class Reading:
    """All that is read in one message."""

    sentences: tuple[Sentence, ...] = ()
    frames: tuple[Frame | None, ...] = ()
    normal: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    conclusions: tuple[Conclusion, ...] = ()
    asked: tuple[Asked, ...] = ()
    question: str = ""
    showed_output: bool = False
    literals: frozenset[str] = frozenset()
    lengths: tuple[float, ...] = ()
    """Of each passage what its value is divided by for its length."""

    @property
    def size(self) -> int:
        """Pieces held, for the bound of :class:`Readings`."""
        return 2 + len(self.sentences) + len(self.passages) + len(self.conclusions) + len(self.asked)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a text that stays visible already says: its sentences and its literals, small."""

    sentences: frozenset[str]
    literals: frozenset[str]

    @property
    def size(self) -> int:
        """Pieces held."""
        return 2 + len(self.sentences) + len(self.literals)


class Readings:
    """A bounded cache of readings by content, least recently used first out; never more than ``most`` pieces."""

    def __init__(self, *, most: int = DEFAULT_PIECES) -> None:
        self._most = most
        self._held = 0
        self._kept: OrderedDict[bytes, Reading | Shown] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, source: Source) -> Reading:
        """The reading of a message."""
        key = _digest(source)
        found = self.find(key)
        if isinstance(found, Reading):
            return found
        made = _with_literals(read(source))
        self.keep(key, made)
        return made

    def conclusions(self, source: Source) -> tuple[Conclusion, ...]:
        """What a message concludes: an answer its findings and decisions, anything else the error that it shows."""
        if source.role != "assistant" or source.tool:
            return self.of(source).conclusions
        key = blake2b(b"concluded\0" + source.text.encode(errors="replace"), digest_size=16).digest()
        found = self.find(key)
        if isinstance(found, Reading):
            return found.conclusions
        made = Reading(conclusions=conclusions(source.text))
        self.keep(key, made)
        return made.conclusions

    def shown(self, text: str) -> Shown:
        """What a visible text says."""
        key = blake2b(b"shown\0" + text.encode(errors="replace"), digest_size=16).digest()
        found = self.find(key)
        if isinstance(found, Shown):
            return found
        made = Shown(frozenset(normal(s) for s in sentences(text)), frozenset(m.value.lower() for m in scan(text)))
        self.keep(key, made)
        return made

    def find(self, key: bytes) -> Reading | Shown | None:
        """What is kept under a key, which is thereby the newest."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, made: Reading | Shown) -> None:
        """Keep what was read, unless it is kept already, and let go of the oldest."""
        if key in self._kept:
            return
        self._kept[key] = made
        self._held += made.size
        while self._held > self._most and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._held -= dropped.size


def _digest(source: Source) -> bytes:
    calls = "\0".join(f"{c.name}\1{c.arguments}" for c in source.calls)
    said = f"{source.role}\0{source.tool}\0{source.arguments}\0{calls}\0{source.text}"
    return blake2b(said.encode(errors="replace"), digest_size=16).digest()


def normal(text: str) -> str:
    """A sentence as it is compared: small, single blanks, no full stop."""
    return " ".join(text.lower().split()).rstrip(".!")


def read(source: Source) -> Reading:
    """Everything that one message says by itself."""
    asked = tuple(_asked(source))
    if source.role in SPEAKERS and not source.tool:
        return _read_speaker(source.text, asked=asked)
    if source.is_result:
        error = open_error(source.text)
        return Reading(
            passages=tuple(result_passages(source.text, tool=source.tool, arguments=source.arguments)),
            conclusions=(error,) if error else (),
            asked=asked,
        )
    if source.role == "assistant":
        return Reading(passages=tuple(answer_passages(source.text)), asked=asked)
    return Reading(asked=asked)


def _with_literals(reading: Reading) -> Reading:
    """The reading with the literals that stand alone in a passage, and what the passages' lengths come to."""
    return replace(
        reading,
        literals=frozenset(v for p in reading.passages if len(p.keys) == 1 for v in p.keys),
        lengths=tuple((1.5 + (len(p.text) + len(p.key)) / 4.0) ** EXPONENT for p in reading.passages),
    )


def _read_speaker(text: str, *, asked: tuple[Asked, ...]) -> Reading:
    """A user's message: prose is what was said; program output pasted into it is read like a tool's result."""
    said: list[Sentence] = []
    output: list[str] = []
    first_output = 0
    for index, statement in enumerate(statements(text)):
        if is_prose(statement):
            said.append(read_sentence(statement, index=index))
        else:
            first_output = first_output if output else index
            output.append(statement)
    pasted = "\n".join(output)
    mostly = len(pasted) > 400 and len(pasted) > sum(len(s.text) for s in said)
    passages = tuple(named_by_user(scan(text[:20_000]))) if not mostly else ()
    if output:
        passages += tuple(output_passages(pasted, group=SHOWN))
    error = open_error(text) if mostly else None
    if mostly:
        said = [s for s in said if s.index < first_output or s.rule >= RULE_THRESHOLD or len(s.text) > 40]
    return Reading(
        sentences=tuple(said),
        frames=tuple(frame(s) for s in said),
        normal=tuple(normal(s.text) for s in said),
        passages=passages,
        conclusions=(error,) if error else (),
        asked=asked,
        question="" if mostly else question(text),
        showed_output=mostly,
    )


def _asked(source: Source) -> list[Asked]:
    found: list[Asked] = []
    for arguments in (c.arguments for c in source.calls) if source.calls else (source.arguments,):
        document = parse(arguments) if arguments else None
        found.extend(_ask(leaf) for leaf in (leaves(document) if document is not None else ()))
    return found


def _ask(leaf: Leaf) -> Asked:
    plain = leaf.kind is Kind.WORD or leaf.kind is Kind.NUMBER
    return Asked(leaf.value, "" if plain else shape(leaf.value), leaf.key)
