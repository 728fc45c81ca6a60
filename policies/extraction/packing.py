"""Choosing what enters an extract within a budget of tokens, and writing it down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from policies.extraction.identifiers import literals
from policies.tokens import TokenCounter

EXPONENT = 0.5
PROBABLY_STALE = 0.3
RULE_SHARE = 0.30
RULES_FIRST = 0.7  # of the budget: so far a rule comes before any fact
ROOMY = 512  # tokens; in less than that everything competes
EXACT_BELOW = 1_500  # tokens; above, the price of a piece is estimated and the whole is counted
USER_SHARE = 0.15
NOTE_SHARE = 0.25
NOTE_SHARE_BRIEF = 0.12
NOTE_BRIEF_FROM = 1.5
"""In a small budget only conclusions of so much score have a share of their own."""
ROUNDS = 8
NAMED = "the user named:"
"""The heading of bare literals, which are never worth saying twice."""
HEADINGS = {
    "brief": "User said:",
    "rule": "User rules:",
    "user": "User said:",
    "note": "Assistant's conclusions, oldest first:",
    "fact": "Facts:",
}
CALLED = "also called"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A text that may enter the extract: in which section, under which heading, in which order, how valuable.

    ``key`` labels the text; ``record`` numbers the object that it stands in; ``dense`` marks codes, of which a token
    holds fewer characters. An empty ``text`` asks for its heading alone. Pieces are compared by identity.
    """

    section: str
    group: str
    order: tuple[int, int, int]
    text: str
    score: float
    keys: frozenset[str] = frozenset()
    after: tuple[int, int, int] | None = None
    key: str = ""
    record: int = 0
    dense: bool = False

    @property
    def density(self) -> float:
        """Value for its length; where room is for a few sentences only, length counts in full."""
        exponent = 1.0 if self.section == "brief" else EXPONENT
        length = (1.5 + (len(self.text) + len(self.key)) / 4.0) ** exponent
        return (PROBABLY_STALE if self.after else 1.0) * self.score / float(length)


@dataclass(frozen=True, slots=True)
class Queues:
    """All pieces, each kind in the order in which it is tried."""

    rules: tuple[Piece, ...]
    talk: tuple[Piece, ...]
    notes: tuple[Piece, ...]
    rest: tuple[Piece, ...]

    @classmethod
    def of(
        cls, rules: Sequence[Piece], talk: Sequence[Piece], notes: Sequence[Piece], facts: Sequence[Piece]
    ) -> "Queues":
        """The queues of these pieces."""
        by_score = sorted(rules, key=lambda p: (-p.score, p.order))
        density = {id(p): p.density for group in (rules, talk, notes, facts) for p in group}
        spoken = sorted(talk, key=lambda p: (-density[id(p)], p.order))
        concluded = sorted(notes, key=lambda p: (-density[id(p)], p.order))
        rest = sorted((*by_score, *spoken, *concluded, *facts), key=lambda p: (-density[id(p)], p.order))
        return cls(tuple(by_score), tuple(spoken), tuple(concluded), tuple(rest))


@dataclass(slots=True)
class _Pack:
    """Pieces chosen so far, with what they cost and the literals they carry."""

    counter: TokenCounter
    budget: int
    exact: bool
    known: set[str]
    costs: dict[str, int]
    chosen: dict[Piece, None] = field(default_factory=dict)
    groups: set[tuple[str, str]] = field(default_factory=set)
    labels: set[tuple[str, str]] = field(default_factory=set)
    said: set[tuple[int, int, int]] = field(default_factory=set)
    used: float = 0

    def cost(self, text: str, *, dense: bool = False) -> float:
        """Tokens of a text with what separates it from the next, counted or estimated."""
        if not self.exact:
            return 1.0 + len(text) / (2.6 if dense else 4.4)
        if text not in self.costs:
            self.costs[text] = self.counter.count(text)
        return self.costs[text]

    def price(self, piece: Piece) -> float:
        """Tokens that adding the piece costs, its headings included."""
        price = self.cost(f" {piece.text};" if self.exact else piece.text, dense=piece.dense)
        if (piece.section, "") not in self.groups:
            price += self.cost(f"{HEADINGS[piece.section]}\n")
        if (piece.section, piece.group) not in self.groups or not piece.group:
            price += self.cost(f"- {piece.group}") if not piece.group.isdigit() else 2
        if piece.key and (piece.record or (piece.group, piece.key) not in self.labels):
            price += self.cost(f" {piece.key}") if (piece.group, piece.key) not in self.labels else 0
        return price

    def literals(self, piece: Piece) -> frozenset[str]:
        """What the piece carries: its keys, or where it has none the text itself."""
        return piece.keys or frozenset({(piece.text or piece.group).lower()})

    def waits(self, piece: Piece) -> bool:
        """Whether the piece says nothing new, or its successor is not in yet."""
        if piece.after:
            return piece.after not in self.said
        return piece.section == "fact" and self.literals(piece) <= self.known

    def add(self, piece: Piece, *, limit: float) -> bool:
        """Whether the piece fitted within ``limit`` tokens in all and is in now."""
        if piece in self.chosen:
            return True
        price = self.price(piece)
        if self.used + price > min(limit, self.budget):
            return False
        self.chosen[piece] = None
        self.used += price
        if (piece.section, piece.group) not in self.groups:
            self.groups |= {(piece.section, ""), (piece.section, piece.group)}
            if piece.section == "fact":
                self.known |= {value.lower() for value in literals(piece.group)}
        if piece.key:
            self.labels.add((piece.group, piece.key))
        self.known |= self.literals(piece)
        if piece.section != "fact":
            self.said.add(piece.order)
        return True

    def drop_repeated(self) -> bool:
        """Whether bare literals were taken out again because a sentence that came in later carries them."""
        spoken = frozenset[str]().union(*(p.keys for p in self.chosen if p.section != "fact"))
        repeated = [p for p in self.chosen if p.group == NAMED and p.keys <= spoken]
        for piece in repeated:
            del self.chosen[piece]
            self.used -= self.price(piece)
        return bool(repeated)


def _pack(queues: Queues, *, pack: _Pack) -> None:
    budget = pack.budget
    for piece in queues.rules:
        if not piece.after and not pack.add(piece, limit=RULE_SHARE * budget):
            break
    for pieces, share in (
        (queues.talk, USER_SHARE),
        (queues.notes, NOTE_SHARE if budget >= ROOMY else NOTE_SHARE_BRIEF),
    ):
        spent = pack.used
        for piece in pieces:
            if not piece.after and (budget >= ROOMY or piece.section != "note" or piece.score >= NOTE_BRIEF_FROM):
                pack.add(piece, limit=spent + share * budget)
            if spent + share * budget - pack.used < 4:
                break
    if budget >= ROOMY:
        for piece in queues.rules:
            pack.add(piece, limit=RULES_FIRST * budget)
    later = _fill(queues.rest, pack=pack)
    if pack.drop_repeated():
        later = _fill(queues.rest, pack=pack)
    for piece in later:
        if budget - pack.used < 3:
            return
        if piece.group != NAMED and piece.text and not (piece.after and pack.waits(piece)):
            pack.add(piece, limit=budget)


def _fill(pieces: Sequence[Piece], *, pack: _Pack) -> list[Piece]:
    """Adds pieces in order while there is room; those come back that say nothing new or wait for their successor."""
    later: list[Piece] = []
    for piece in pieces:
        if pack.budget - pack.used < 3:
            break
        if piece in pack.chosen:
            continue
        if pack.waits(piece):
            later.append(piece)
        else:
            pack.add(piece, limit=pack.budget)
    return later


def fit(queues: Queues, *, max_tokens: int, counter: TokenCounter, known: set[str]) -> str:
    """The rendered pieces that tell most within ``max_tokens``; empty where not even one fits whole."""
    costs: dict[str, int] = {}
    budget, best = max_tokens, ""
    for _ in range(ROUNDS):
        pack = _Pack(counter, budget, max_tokens < EXACT_BELOW, set(known), costs)
        _pack(queues, pack=pack)
        text = render(pack.chosen)
        tokens = counter.count(text) if text else 0
        slack = max_tokens - tokens
        if slack >= 0:
            best = max(best, text, key=len)
            if slack <= max(4, max_tokens // 40) or pack.used < budget - max(12, slack):
                break
            budget += max(1, slack * 3 // 4)
        else:
            budget = min(budget - 2, int(budget * max_tokens / tokens) - 1)
        if budget <= 0:
            break
    return best


def render(chosen: Iterable[Piece]) -> str:
    """The text of the chosen pieces, section by section, one line for each heading or sentence."""
    ordered = sorted(chosen, key=lambda p: p.order)
    lines: list[str] = []
    for section, heading in HEADINGS.items():
        groups: dict[tuple[object, ...], list[Piece]] = {}
        for piece in ordered:
            if piece.section == section:
                groups.setdefault(_line_of(piece), []).append(piece)
        if groups:
            lines.append(heading)
            lines.extend(_fact_lines(groups.values()) if section == "fact" else map(_spoken_line, groups.values()))
    return "\n".join(lines)


def _spoken_line(pieces: Sequence[Piece]) -> str:
    mark = "" if pieces[0].group.isdigit() else pieces[0].group
    bullet = "" if pieces[0].section == "brief" and mark else "- "
    said = " ".join(p.text for p in pieces)
    return f"{bullet}{mark} {said}" if mark else f"{bullet}{said}"


def _fact_lines(groups: Iterable[Sequence[Piece]]) -> list[str]:
    """A line for each heading with what is under it; calls of which nothing is kept share the last line."""
    lines: list[str] = []
    bare: dict[str, list[str]] = {}
    above = ""
    for pieces in groups:
        heading = pieces[0].group.rstrip(":")
        tool, parenthesis, argument = heading.partition("(")
        said = _facts(pieces)
        if not said:
            bare.setdefault(tool, []).append(argument.removesuffix(")") if parenthesis else "")
            continue
        same = parenthesis and tool == above
        above = tool if parenthesis else ""
        lines.append(f"- {f'…({argument}' if same else heading}: {said}")
    calls = [f"{tool}({'; '.join(filter(None, arguments))})" for tool, arguments in bare.items()]
    return [*lines, f"- {CALLED}: {', '.join(calls)}"] if calls else lines


def _facts(pieces: Sequence[Piece]) -> str:
    """The values of one heading, each label said once; values of one record go together."""
    parts: list[str] = []
    labelled: set[str] = set()
    previous = -1
    for piece in (p for p in pieces if p.text):
        label = f"{piece.key} " if piece.key and piece.key not in labelled else ""
        labelled.add(piece.key)
        if parts and piece.record and piece.record == previous:
            parts[-1] += f", {label}{piece.text}"
        else:
            parts.append(f"{label}{piece.text}")
        previous = piece.record
    return "; ".join(parts)


def _line_of(piece: Piece) -> tuple[object, ...]:
    """What the pieces of one line share: a fact's heading, a label, else a sentence of its own or its message."""
    if piece.section == "fact" or (piece.group and piece.section != "note"):
        return (piece.group,)
    return piece.order
