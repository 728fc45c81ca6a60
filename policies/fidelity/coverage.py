"""How much of what a conversation needs stands in its compacted context, looked up without a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from policies.fidelity.contexts import Contexts, compacted_text
from policies.fidelity.questions import LONGEST_VALUE, SHORTEST_VALUE, used_values
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.state import read_state
from policies.summary import normal_text
from policies.text.literals import literals
from policies.text.segments import Source

MOST_MISSING = 40
MOST_LOOKED = 200
MOST_READ = 20_000


@dataclass(frozen=True, slots=True)
class Share:
    """So many of one kind are wanted, and of these so many kept; ``reachable`` counts those kept or archived."""

    wanted: int = 0
    kept: int = 0
    reachable: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.wanted + other.wanted, self.kept + other.kept, self.reachable + other.reachable)

    @property
    def value(self) -> float | None:
        """Kept over wanted, None where nothing is wanted."""
        return self.kept / self.wanted if self.wanted else None

    @property
    def recoverable(self) -> float | None:
        """Kept or in the archive over wanted, None where nothing is wanted."""
        return self.reachable / self.wanted if self.wanted else None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of a conversation is kept.

    ``facts`` are values that it is known to need later, ``identifiers`` what its calls used and its user named
    ``rules`` what the user stated; nothing is counted twice. ``missing`` are the first that are not kept.
    """

    facts: Share = Share()
    identifiers: Share = Share()
    rules: Share = Share()
    missing: tuple[str, ...] = field(default=())

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.facts + other.facts,
            self.identifiers + other.identifiers,
            self.rules + other.rules,
            (*self.missing, *other.missing)[:MOST_MISSING],
        )

    @property
    def whole(self) -> Share:
        """All kinds together."""
        return self.facts + self.identifiers + self.rules

    @property
    def score(self) -> float | None:
        """The share of all that is wanted that is kept; None where nothing is wanted."""
        return self.whole.value


def coverage_of(
    contexts: Contexts,
    *,
    facts: Iterable[Sequence[str]] = (),
    later: Sequence[ToolCall] = (),
    archived: str = "",
    tools: NoteTaking,
) -> Coverage:
    """The coverage of a compacted context; each of ``facts`` is kept if all of its values are.

    Only what stands in the whole context is wanted. ``archived`` is the text of originals that can be fetched back.
    """
    kept = normal_text(compacted_text(contexts))
    whole = normal_text("\n".join(line.text for line in contexts.original))
    archive = f"{kept}\n{normal_text(archived)}"
    missing: list[str] = []

    def share(wanted: Sequence[tuple[str, ...]]) -> Share:
        counts = [0, 0, 0]
        for values in wanted:
            there = _stand(values, kept)
            counts = [counts[0] + 1, counts[1] + there, counts[2] + (there or _stand(values, archive))]
            if not there:
                missing.append(" ".join(values))
        return Share(*counts)

    wanted = [tuple(v) for v in dict.fromkeys(tuple(each) for each in facts if each) if _stand(v, whole)]
    known = {value.lower() for values in wanted for value in values}
    named = _identifiers(contexts.sources, later)
    others = [(v,) for v in named if v.lower() not in known and _stand((v,), whole)]
    rules = [(rule,) for rule in read_state(contexts.sources, goal="", tools=tools).constraints]
    found = Coverage(share(wanted), share(others), share(rules))
    return Coverage(found.facts, found.identifiers, found.rules, tuple(missing[:MOST_MISSING]))


def _identifiers(sources: Sequence[Source], later: Sequence[ToolCall]) -> list[str]:
    """What calls took from earlier messages, and what the user named."""
    found = dict.fromkeys(v for values in used_values(sources, later).values() for v in values)
    for source in sources:
        if source.is_users:
            named = literals(source.text[:MOST_READ])
            found.update(dict.fromkeys(v for v in named if SHORTEST_VALUE <= len(v) <= LONGEST_VALUE))
    return list(found)


def _stand(values: Sequence[str], text: str) -> bool:
    """Whether all of the values stand in a normal text, each as whole words."""
    return all(_stands(" ".join(normal_text(value).split()), text) for value in values)


def _stands(value: str, text: str) -> bool:
    if not value:
        return True
    at = text.find(value)
    for _ in range(MOST_LOOKED):
        if at < 0:
            return False
        end = at + len(value)
        before = at > 0 and value[0].isalnum() and text[at - 1].isalnum()
        after = end < len(text) and value[-1].isalnum() and text[end].isalnum()
        if not before and not after:
            return True
        at = text.find(value, at + 1)
    return False
