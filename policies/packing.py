"""Choosing what enters an extract within a budget of tokens, and writing it down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from policies.identifiers import literals
from policies.tokens import TokenCounter

EXPONENT = 0.5
PROBABLY_STALE = 0.3
RULE_SHARE = 0.30
RULES_FIRST = 0.7  # of the budget: so far a rule comes before any fact
ROOMY = 512  # tokens; in less than that everything competes
USER_SHARE = 0.15
NAMED = "the user named:"
"""The heading of bare literals, which are never worth saying twice."""
HEADINGS = {"brief": "User said:", "rule": "User rules:", "user": "User said:", "fact": "Facts:"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A text that may enter the extract: in which section, under which heading, in which order, how valuable."""

    section: str
    group: str
    order: tuple[int, int, int]
    text: str
    score: float
    keys: frozenset[str] = frozenset()
    after: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _Pack:
    """Pieces chosen so far, with what they cost and the literals they carry."""

    counter: TokenCounter
    budget: int
    known: set[str]
    costs: dict[str, int]
    chosen: dict[Piece, None] = field(default_factory=dict)
    groups: set[tuple[str, str]] = field(default_factory=set)
    said: set[tuple[int, int, int]] = field(default_factory=set)
    used: int = 0

    def cost(self, text: str) -> int:
        """Tokens of a piece with what separates it from the next."""
        if text not in self.costs:
            self.costs[text] = self.counter.count(text)
        return self.costs[text]

    def price(self, piece: Piece) -> int:
        """Tokens that adding the piece costs, its headings included."""
        price = self.cost(f" {piece.text};")
        if (piece.section, "") not in self.groups:
            price += self.cost(f"{HEADINGS[piece.section]}\n")
        if (piece.section, piece.group) not in self.groups or not piece.group:
            price += self.cost(f"- {piece.group}") if not piece.group.isdigit() else 2
        return price

    def literals(self, piece: Piece) -> frozenset[str]:
        """What the piece carries: its keys, or where it has none the literals of its text."""
        if piece.keys:
            return piece.keys
        return frozenset(v.lower() for v in literals(piece.text)) or frozenset({piece.text.lower()})

    def waits(self, piece: Piece) -> bool:
        """Whether the piece says nothing new, or its successor is not in yet."""
        if piece.after:
            return piece.after not in self.said
        return piece.section == "fact" and self.literals(piece) <= self.known

    def add(self, piece: Piece, *, limit: float) -> bool:
        """Whether the piece fitted within ``limit`` tokens in all and is in now."""
        price = self.price(piece)
        if self.used + price > min(limit, self.budget):
            return False
        self.chosen[piece] = None
        self.used += price
        if (piece.section, piece.group) not in self.groups:
            self.groups |= {(piece.section, ""), (piece.section, piece.group)}
            self.known |= {value.lower() for value in literals(piece.group)}
        self.known |= self.literals(piece)
        if piece.section != "fact":
            self.said.add(piece.order)
        return True


def _density(piece: Piece) -> float:
    """Value for its length; where room is for a few sentences only, length counts in full."""
    exponent = 1.0 if piece.section == "brief" else EXPONENT
    return (PROBABLY_STALE if piece.after else 1.0) * piece.score / float((1.5 + len(piece.text) / 4.0) ** exponent)


def _pack(rules: Sequence[Piece], talk: Sequence[Piece], facts: Sequence[Piece], *, pack: _Pack) -> None:
    budget = pack.budget
    for piece in sorted((p for p in rules if not p.after), key=lambda p: (-p.score, p.order)):
        if not pack.add(piece, limit=RULE_SHARE * budget):
            break
    spent = pack.used
    ranked = sorted(talk, key=lambda p: (-_density(p), p.order))
    for piece in ranked:
        if not piece.after:
            pack.add(piece, limit=spent + USER_SHARE * budget)
    if budget >= ROOMY:
        for piece in sorted((p for p in rules if p not in pack.chosen), key=lambda p: (-p.score, p.order)):
            pack.add(piece, limit=RULES_FIRST * budget)
    rest = [p for p in (*rules, *ranked) if p not in pack.chosen]
    later: list[Piece] = []
    for piece in sorted((*rest, *facts), key=lambda p: (-_density(p), p.order)):
        if budget - pack.used < 3:
            return
        if pack.waits(piece):
            later.append(piece)
        else:
            pack.add(piece, limit=budget)
    for piece in later:
        if budget - pack.used < 3:
            return
        if piece.group != NAMED and not (piece.after and pack.waits(piece)):
            pack.add(piece, limit=budget)


def fit(
    rules: Sequence[Piece],
    talk: Sequence[Piece],
    facts: Sequence[Piece],
    *,
    max_tokens: int,
    counter: TokenCounter,
    known: set[str],
) -> str:
    """The rendered pieces that tell most within ``max_tokens``; empty where not even one fits whole."""
    costs: dict[str, int] = {}
    budget, best = max_tokens, ""
    for _ in range(5):
        pack = _Pack(counter, budget, set(known), costs)
        _pack(rules, talk, facts, pack=pack)
        text = _render(pack.chosen)
        tokens = counter.count(text) if text else 0
        if tokens <= max_tokens:
            best = max(best, text, key=len)
            slack = max_tokens - tokens
            if slack <= max(4, max_tokens // 50) or pack.used < budget - max(12, slack):
                break
            budget += max(1, slack * 3 // 4)
        else:
            budget -= tokens - max_tokens + 2
        if budget <= 0:
            break
    return best


def _render(chosen: Iterable[Piece]) -> str:
    ordered = sorted(chosen, key=lambda p: p.order)
    lines: list[str] = []
    for section, heading in HEADINGS.items():
        groups: dict[tuple[object, ...], list[Piece]] = {}
        for piece in ordered:
            if piece.section == section:
                groups.setdefault(_line_of(piece), []).append(piece)
        if groups:
            lines.append(heading)
        above = ""
        for pieces in groups.values():
            group = pieces[0].group
            tool = group.partition("(")[0] if "(" in group else ""
            mark = f"…{group[len(tool) :]}" if tool and tool == above else "" if group.isdigit() else group
            above = tool
            bullet = "" if section == "brief" and mark else "- "
            said = ("; " if section == "fact" else " ").join(p.text for p in pieces if p.text)
            lines.append(f"{bullet}{mark} {said}" if mark and said else f"{bullet}{mark.rstrip(':')}{said}")
    return "\n".join(lines)


def _line_of(piece: Piece) -> tuple[object, ...]:
    """What the pieces of one line share: a fact's heading, a label, else a sentence of its own or its message."""
    if piece.section == "fact" or piece.group:
        return (piece.group,)
    return piece.order
