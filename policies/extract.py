"""The deterministic extract: what code keeps of a span of messages that leaves the window.

Rules of the user first, then the user's own words, then facts from tool results and answers, grouped by what
they are about. Everything is ranked by how much it tells for its tokens, so the same function serves a budget
of 100 tokens and one of 4,000. The text never exceeds its budget by the given counter.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp

from policies.checkpoint import Checkpoint, Identifier
from policies.findings import clip, leaves, parse
from policies.identifiers import STRONG, Kind, literals, scan, shape
from policies.passages import answer_passages, result_passages, topic
from policies.messages import ToolCall
from policies.rules import RULE_THRESHOLD, Sentence, read_sentences, sentences, superseded, telegraph
from policies.summary import render_summary
from policies.tokens import TokenCounter

__all__ = ["Extract", "Source", "extract", "render_summary"]

EXPONENT = 0.7
SEEN = 0.1
FLOOR = 0.35
RULE_SHARE = 0.30
USER_SHARE = 0.15
RECENCY_MESSAGES = 40.0
BRIEF_BELOW = 256
"""Below so many tokens the user's statements of fact lose their function words; rules never do."""
HEADINGS = {"rule": "User rules:", "user": "User said:", "fact": "Facts:"}


@dataclass(frozen=True, slots=True)
class Source:
    """One message that leaves the window; a tool result carries the call that it answers."""

    position: int
    role: str
    text: str
    tool: str = ""
    arguments: str = ""
    tokens: int = 0
    ref: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Extract:
    """The extract's ``text`` without a fence, its tokens, and the checkpoint that it belongs to."""

    text: str
    tokens: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Piece:
    """A text that may enter the extract: in which section, under which heading, in which order, how valuable."""

    section: str
    group: str
    order: tuple[int, int, int]
    text: str
    score: float
    keys: frozenset[str] = frozenset()
    late: bool = False


@dataclass(slots=True)
class _Uses:
    """What later tool calls asked for: values, their shapes, the names of arguments."""

    values: Counter[str] = field(default_factory=Counter)
    shapes: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def boost(self, *, key: str, value: str) -> float:
        """How much more a value is worth than its kind alone says."""
        factor = 1.0 + SEEN * min(5, self.seen[value.lower()])
        if value in self.values:
            factor *= 1.6 + 0.1 * min(4, self.values[value])
        elif shape(value) in self.shapes:
            factor *= 1.5
        if key and (key in self.keys or f"{key}s" in self.keys):
            factor *= 1.3
        return factor


def extract(
    sources: Sequence[Source],
    *,
    max_tokens: int,
    counter: TokenCounter,
    goal: str = "",
    visible: Sequence[str] = (),
    previous: Checkpoint | None = None,
) -> Extract:
    """The extract of ``sources`` within ``max_tokens``, without what ``goal`` and ``visible`` already say."""
    said = _user_sentences(sources)
    stale = superseded(said)
    end = max((s.position for s in sources), default=0) + 1
    shown = {_normal(s) for text in (goal, *visible) for s in sentences(text)}
    known = {value.lower() for text in (goal, *visible) for value in literals(text)}
    rules, talk = _spoken(said, stale=stale, end=end, shown=shown, brief=max_tokens < BRIEF_BELOW)
    facts = list(_facts(sources, end=end, retired=_retired(said, stale=stale)))
    text = _fit(rules, talk, facts, max_tokens=max_tokens, counter=counter, known=known) if max_tokens > 0 else ""
    return Extract(
        text, counter.count(text) if text else 0, _checkpoint(rules, facts, text, goal=goal, previous=previous)
    )


def _normal(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".!")


def _user_sentences(sources: Sequence[Source]) -> tuple[Sentence, ...]:
    """The user's sentences in order, each once, at its newest place."""
    newest: dict[str, Sentence] = {}
    for source in sources:
        if source.role != "user":
            continue
        for sentence in read_sentences(source.text, position=source.position):
            key = _normal(sentence.text)
            newest.pop(key, None)
            newest[key] = sentence
    return tuple(newest.values())


def _recency(position: int, *, end: int) -> float:
    return exp(-max(0, end - position) / RECENCY_MESSAGES)


def _spoken(
    said: Sequence[Sentence], *, stale: dict[int, bool], end: int, shown: set[str], brief: bool
) -> tuple[list[Piece], list[Piece]]:
    rules: list[Piece] = []
    talk: list[Piece] = []
    labels = Counter(s.label for i, s in enumerate(said) if s.label and not stale.get(i))
    for index, sentence in enumerate(said):
        if stale.get(index) or _normal(sentence.text) in shown:
            continue
        late = index in stale
        keys = frozenset(v.lower() for v in literals(sentence.text))
        order = (sentence.position, sentence.index, 0)
        label, body = _split_label(sentence, common=labels)
        if sentence.rule >= RULE_THRESHOLD:
            score = sentence.rule + 0.5 * _recency(sentence.position, end=end)
            rules.append(Piece("rule", label, order, body, score, keys, late))
        else:
            score = (sentence.weight + 0.4 * sentence.rule) * (0.5 + 0.5 * _recency(sentence.position, end=end))
            if brief and keys:
                body = telegraph(body)
            talk.append(Piece("user", label or str(sentence.position), order, body, score, keys, late))
    return rules, talk


def _split_label(sentence: Sentence, *, common: Counter[str]) -> tuple[str, str]:
    """A label that several sentences share is said once above them, the rest of each stays as it was."""
    label, colon, body = sentence.text.partition(":")
    if common[sentence.label] < 2 or not label.isupper():
        return "", sentence.text
    return f"{label.strip()}{colon}", body.strip()


def _retired(said: Sequence[Sentence], *, stale: dict[int, bool]) -> frozenset[str]:
    """Literals that only replaced statements hold."""
    old: set[str] = set()
    live: set[str] = set()
    for index, sentence in enumerate(said):
        (old if index in stale else live).update(literals(sentence.text))
    return frozenset(old - live)


def _facts(sources: Sequence[Source], *, end: int, retired: frozenset[str]) -> Iterator[Piece]:
    """Pieces from tool calls, tool results, answers, and literals of the user's longer messages."""
    uses = _read_uses(sources)
    last_call = {(s.tool, s.arguments): s.position for s in sources if s.tool}
    asked = ""
    for source in sources:
        weight = FLOOR + (1 - FLOOR) * _recency(source.position, end=end)
        if source.role == "user":
            asked = source.text
            for n, mention in enumerate(scan(source.text[:20_000])):
                if mention.kind in STRONG and mention.value not in retired:
                    boost = 1.2 * uses.boost(key="", value=mention.value)
                    yield _fact("the user named", source, n, mention.value, mention.kind, weight * boost)
            continue
        if source.tool or source.role in {"tool", "function"}:
            if last_call.get((source.tool, source.arguments), source.position) != source.position:
                continue
            passages: Iterable[tuple[str, str, str, Kind, float]] = result_passages(
                source.text, tool=source.tool, arguments=source.arguments
            )
        elif source.role == "assistant":
            passages = answer_passages(source.text, group=topic(asked))
        else:
            continue
        for n, (group, key, text, kind, value) in enumerate(passages):
            literal = (text.removeprefix(f"{key} ") if key else text) or group
            yield _fact(group, source, n, text, kind, weight * value * uses.boost(key=key, value=literal), literal)


def _fact(group: str, source: Source, n: int, text: str, kind: Kind, score: float, literal: str = "") -> Piece:
    keys = frozenset({(literal or text).lower()})
    if kind in {Kind.WORD, Kind.QUOTE}:
        keys = frozenset(v.lower() for v in literals(text)) or keys
    return Piece("fact", f"{group}:", (source.position, n, 0), text, score, keys)


def _read_uses(sources: Sequence[Source]) -> _Uses:
    uses = _Uses()
    for source in sources:
        for arguments in (source.arguments, *(call.arguments for call in source.calls)):
            document = parse(arguments) if arguments else None
            for leaf in leaves(document) if document is not None else ():
                uses.values[leaf.value] += 1
                if leaf.kind is not Kind.WORD and leaf.kind is not Kind.NUMBER:
                    uses.shapes.add(shape(leaf.value))
                if leaf.key:
                    uses.keys.add(leaf.key)
        uses.seen.update({value.lower() for value in literals(source.text[:50_000])})
    return uses


@dataclass(slots=True)
class _Pack:
    """Pieces chosen so far, with what they cost and the literals they carry."""

    counter: TokenCounter
    budget: int
    known: set[str]
    costs: dict[str, int]
    chosen: dict[Piece, None] = field(default_factory=dict)
    groups: set[tuple[str, str]] = field(default_factory=set)
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
        self.known |= piece.keys
        return True


def _density(piece: Piece) -> float:
    return piece.score / (1.5 + len(piece.text) / 4.0) ** EXPONENT


def _pack(rules: Sequence[Piece], talk: Sequence[Piece], facts: Sequence[Piece], *, pack: _Pack) -> None:
    budget = pack.budget
    for piece in sorted((p for p in rules if not p.late), key=lambda p: (-p.score, p.order)):
        if not pack.add(piece, limit=RULE_SHARE * budget):
            break
    spent = pack.used
    ranked = sorted((p for p in talk if not p.late), key=lambda p: (-_density(p), p.order))
    for piece in ranked:
        pack.add(piece, limit=spent + USER_SHARE * budget)
    rest = [p for p in (*rules, *ranked) if p not in pack.chosen and not p.late]
    pool = sorted((*rest, *facts), key=lambda p: (-_density(p), p.order))
    repeats: list[Piece] = []
    for piece in pool:
        if budget - pack.used < 3:
            return
        if piece.section == "fact" and piece.keys <= pack.known:
            repeats.append(piece)
        else:
            pack.add(piece, limit=budget)
    late = [p for p in (*rules, *talk) if p.late]
    for piece in (*repeats, *late):
        if budget - pack.used < 3:
            return
        pack.add(piece, limit=budget)


def _fit(
    rules: Sequence[Piece],
    talk: Sequence[Piece],
    facts: Sequence[Piece],
    *,
    max_tokens: int,
    counter: TokenCounter,
    known: set[str],
) -> str:
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
    return best or _last_resort(rules, max_tokens=max_tokens, counter=counter)


def _last_resort(rules: Sequence[Piece], *, max_tokens: int, counter: TokenCounter) -> str:
    first = max(rules, key=lambda p: (p.score, p.order), default=None)
    return clip(first.text, max_tokens=max_tokens, counter=counter) if first else ""


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
            said = ("; " if section == "fact" else " ").join(p.text for p in pieces if p.text)
            lines.append(f"- {mark} {said}" if mark and said else f"- {mark.rstrip(':')}{said}")
    return "\n".join(lines)


def _line_of(piece: Piece) -> tuple[object, ...]:
    """What the pieces of one line share: a fact's heading, a label, else a sentence of its own or its message."""
    if piece.section == "fact" or piece.group:
        return (piece.group,)
    return piece.order


def _checkpoint(
    rules: Sequence[Piece], facts: Sequence[Piece], text: str, *, goal: str, previous: Checkpoint | None
) -> Checkpoint:
    """A checkpoint with every rule (never fewer than the previous one that still stand) and the ranked identifiers."""
    base = previous or Checkpoint()
    stated = tuple(dict.fromkeys((*base.constraints, *(_whole(p) for p in sorted(rules, key=lambda p: p.order)))))
    ranked = sorted(facts, key=lambda p: (-p.score, p.order))
    identifiers: dict[str, Identifier] = {}
    for piece in ranked:
        if len(identifiers) >= 200:
            break
        identifiers.setdefault(piece.text, Identifier(piece.text, piece.group.rstrip(":"), piece.text in text))
    return base.advance(goal=base.goal or goal, constraints=stated, identifiers=tuple(identifiers.values()))


def _whole(rule: Piece) -> str:
    return f"{rule.group} {rule.text}" if rule.group else rule.text
