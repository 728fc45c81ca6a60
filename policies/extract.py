"""The deterministic extract: what code keeps of a span of messages that leaves the window.

Rules of the user first, then the user's own words, then facts from tool results and answers, grouped by what
they are about. Everything is ranked by how much it tells for its tokens, so the same function serves a budget
of 100 tokens and one of 4,000. The text never exceeds its budget by the given counter.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp

from policies.checkpoint import Checkpoint, Identifier
from policies.findings import leaves, parse
from policies.identifiers import Kind, literals, shape
from policies.messages import ToolCall
from policies.packing import Piece, fit
from policies.passages import Passage, answer_passages, named_by_user, result_passages, telegraph, topic
from policies.rules import (
    RULE_THRESHOLD,
    Sentence,
    read_sentence,
    sentences,
    statements,
)
from policies.summary import render_summary
from policies.supersession import Successor, superseded
from policies.tokens import TokenCounter

__all__ = ["Extract", "Source", "extract", "render_summary"]

SEEN = 0.1
FLOOR = 0.6
RECENCY_MESSAGES = 40.0
BRIEF_BELOW = 256
"""Below so many tokens the user's statements of fact lose their function words; rules never do."""


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
    text = fit(rules, talk, facts, max_tokens=max_tokens, counter=counter, known=known) if max_tokens > 0 else ""
    base = _without(previous, said=said, stale=stale)
    checkpoint = _checkpoint(rules, facts, text, goal=goal, previous=base)
    return Extract(text, counter.count(text) if text else 0, checkpoint)


def _without(
    previous: Checkpoint | None, *, said: Sequence[Sentence], stale: dict[int, Successor]
) -> Checkpoint | None:
    """The previous checkpoint without the constraints that the user has surely replaced since."""
    if previous is None:
        return None
    replaced = {said[index].text for index, newer in stale.items() if newer.sure}
    return replace(previous, constraints=tuple(c for c in previous.constraints if c not in replaced))


def _normal(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".!")


def _user_sentences(sources: Sequence[Source]) -> tuple[Sentence, ...]:
    """The user's sentences in order, each once, at its newest place."""
    newest: dict[str, tuple[str, int, int]] = {}
    for source in sources:
        if source.role != "user":
            continue
        for index, text in enumerate(statements(source.text)):
            key = _normal(text)
            newest.pop(key, None)
            newest[key] = (text, source.position, index)
    return tuple(read_sentence(text, position=position, index=index) for text, position, index in newest.values())


def _recency(position: int, *, end: int) -> float:
    return exp(-max(0, end - position) / RECENCY_MESSAGES)


def _spoken(
    said: Sequence[Sentence], *, stale: dict[int, Successor], end: int, shown: set[str], brief: bool
) -> tuple[list[Piece], list[Piece]]:
    rules: list[Piece] = []
    talk: list[Piece] = []
    labels = Counter(s.label for i, s in enumerate(said) if s.label and not (i in stale and stale[i].sure))
    for index, sentence in enumerate(said):
        newer = stale.get(index)
        if (newer and newer.sure) or _normal(sentence.text) in shown:
            continue
        after = (said[newer.index].position, said[newer.index].index, 0) if newer else None
        keys = sentence.literals
        order = (sentence.position, sentence.index, 0)
        label, body = _split_label(sentence, common=labels)
        if sentence.rule >= RULE_THRESHOLD:
            score = sentence.rule + 0.5 * _recency(sentence.position, end=end)
            rules.append(Piece("brief" if brief else "rule", label, order, body, score, keys, after))
        else:
            score = (
                (1.25 if brief else 1.6)
                * (sentence.weight + 0.4 * sentence.rule)
                * (0.5 + 0.5 * _recency(sentence.position, end=end))
            )
            if brief and keys:
                body = telegraph(body)
            group = label or str(sentence.position)
            talk.append(Piece("brief" if brief else "user", group, order, body, score, keys, after))
    return rules, talk


def _split_label(sentence: Sentence, *, common: Counter[str]) -> tuple[str, str]:
    """A label that several sentences share is said once above them, the rest of each stays as it was."""
    label, colon, body = sentence.text.partition(":")
    if common[sentence.label] < 2 or not label.isupper():
        return "", sentence.text
    return f"{label.strip()}{colon}", body.strip()


def _retired(said: Sequence[Sentence], *, stale: dict[int, Successor]) -> frozenset[str]:
    """Literals that only replaced statements hold."""
    old: set[str] = set()
    live: set[str] = set()
    for index, sentence in enumerate(said):
        (old if index in stale else live).update(m.value for m in sentence.mentions)
    return frozenset(old - live)


def _facts(sources: Sequence[Source], *, end: int, retired: frozenset[str]) -> Iterator[Piece]:
    """Pieces from tool calls, tool results, answers, and literals of the user's longer messages."""
    uses = _read_uses(sources)
    found = list(_passages(sources))
    places = {(_literal(passage).lower(), source.position) for source, _, passage in found}
    uses.seen.update(value for value, _ in places)
    for source, n, passage in found:
        group, key, text, kind, value = passage
        weight = FLOOR + (1 - FLOOR) * _recency(source.position, end=end)
        literal = _literal(passage)
        if source.role == "user" and text in retired:
            continue
        score = weight * value * uses.boost(key=key, value=literal)
        keys = frozenset() if kind in {Kind.WORD, Kind.QUOTE} else frozenset({literal.lower()})
        yield Piece("fact", f"{group}:", (source.position, n, 0), text, score, keys)


def _literal(passage: Passage) -> str:
    group, key, text, _, _ = passage
    return (text.removeprefix(f"{key} ") if key else text) or group


def _passages(sources: Sequence[Source]) -> Iterator[tuple[Source, int, Passage]]:
    """The passages of every message with their number in it; of repeated calls only the newest counts."""
    last_call = {(s.tool, s.arguments): s.position for s in sources if s.tool}
    asked = ""
    for source in sources:
        passages: Iterable[Passage] = ()
        if source.role == "user":
            asked = source.text
            passages = named_by_user(source.text)
        elif source.tool or source.role in {"tool", "function"}:
            if last_call.get((source.tool, source.arguments), source.position) == source.position:
                passages = result_passages(source.text, tool=source.tool, arguments=source.arguments)
        elif source.role == "assistant":
            passages = answer_passages(source.text, group=topic(asked))
        for n, passage in enumerate(passages):
            yield source, n, passage


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
    return uses


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
