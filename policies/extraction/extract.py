"""The deterministic extract: what code keeps of a span of messages that leaves the window.

Rules of the user first, then the user's own words, what the assistant concluded, then facts from tool results and
answers, grouped by what they are about. Everything is ranked by how much it tells for its tokens, so the same
function serves a budget of 100 tokens and one of 4,000. The text never exceeds its budget by the given counter.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp

from policies.checkpoint import Checkpoint, Identifier
from policies.extraction.claims import Frame, frame
from policies.extraction.conclusions import EMPHASIS, Conclusion
from policies.extraction.identifiers import Kind
from policies.extraction.packing import ROOMY, Piece, Queues, fit
from policies.extraction.passages import telegraph
from policies.extraction.readings import Reading, Readings, Source, normal
from policies.extraction.rules import RULE_THRESHOLD, Sentence, read_sentence, statements
from policies.extraction.supersession import Successor, superseded
from policies.summary import render_summary
from policies.tokens import TokenCounter

__all__ = ["Extract", "Readings", "Source", "extract", "render_summary"]

SEEN = 0.1
FLOOR = 0.3
RECENCY_MESSAGES = 40.0
TASK_MESSAGES = 80.0
"""In so many messages all is likely to be of one task."""
STEP_MESSAGES = 12.0
"""What is left to do is done, and an error mended, within so many messages (e-fold)."""
BRIEF_BELOW = 256
"""Below so many tokens the user's statements of fact lose their function words; rules never do."""
BRIEF_RULE = 5
"""In so small a budget a rule in many words is worth no more than a plain one."""
TOLD = 0.2
"""What a sentence of an answer is worth as a fact that is a conclusion already."""
MOST_FACTS = 1_000
MOST_IDENTIFIERS = 200
_DENSE = frozenset(
    {Kind.CODE, Kind.DATE, Kind.URL, Kind.HOST, Kind.EMAIL, Kind.PATH, Kind.SYMBOL, Kind.NUMBER, Kind.TIME}
)
_PASSING = frozenset({"next", "error"})
_LASTING = frozenset({"done", "decided", "important"})
LONGEST_REPORT = 1_200
"""An answer of more characters, outside a run of tool calls, explains something and reports nothing."""


@dataclass(frozen=True, slots=True)
class Extract:
    """The extract's ``text`` without a fence, its tokens, and the checkpoint that it belongs to.

    ``retired`` are literals, in lower case, that only statements hold which the user has replaced since.
    """

    text: str
    tokens: int
    checkpoint: Checkpoint
    retired: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Said:
    """A user's sentence, with its claims, at its newest place."""

    position: int
    role: str
    sentence: Sentence
    frame: Frame | None
    normal: str

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.position, self.sentence.index, 0)


@dataclass(slots=True)
class _Uses:
    """What tool calls asked for: by value the last place and how often, their shapes, and the names of arguments.

    A value counts as used where a call behind it asks for it, so a call is no use of its own arguments.
    """

    last: dict[str, int] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    shapes: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


def extract(
    sources: Sequence[Source],
    *,
    max_tokens: int,
    counter: TokenCounter,
    goal: str = "",
    visible: Sequence[str] = (),
    later: Sequence[str] = (),
    previous: Checkpoint | None = None,
    readings: Readings | None = None,
) -> Extract:
    """The extract of ``sources`` within ``max_tokens``, without what ``goal`` and ``visible`` already say.

    ``later`` are texts of the user that stay in the window behind the sources: what they replace is stale already.
    ``readings`` keeps what was read in single messages for the next call.
    """
    reader = Readings() if readings is None else readings
    read = [reader.of(source) for source in sources]
    concluded = list(_concluded(sources, read, reader=reader))
    end = max((s.position for s in sources), default=0) + 1
    said = _said(sources, read, later=later, end=end)
    stale = superseded([s.sentence for s in said], [s.frame for s in said])
    shown = [reader.shown(text) for text in (goal, *visible)]
    rules, talk = _spoken(
        said, stale=stale, end=end, shown=set().union(*(s.sentences for s in shown)), brief=max_tokens < BRIEF_BELOW
    )
    retired = _retired(said, stale=stale)
    notes = [p for p in _notes(sources, concluded, end=end) if p.keys.isdisjoint(retired)]
    facts = _facts(
        sources,
        read,
        end=end,
        retired=retired,
        told={c.text for _, said in concluded for c in said},
        labelled=max_tokens >= ROOMY,
        most=max(MOST_FACTS, max_tokens // 2),
    )
    text = ""
    if max_tokens > 0:
        known = set().union(*(s.literals for s in shown))
        text = fit(Queues.of(rules, talk, notes, facts), max_tokens=max_tokens, counter=counter, known=known)
    base = _without(previous, said=said, stale=stale)
    checkpoint = _checkpoint(rules, facts, text, goal=goal, previous=base)
    return Extract(text, counter.count(text) if text else 0, checkpoint, retired)


def _without(previous: Checkpoint | None, *, said: Sequence[_Said], stale: dict[int, Successor]) -> Checkpoint | None:
    """The previous checkpoint without the constraints that the user has surely replaced since."""
    if previous is None:
        return None
    replaced = {said[index].sentence.text for index, newer in stale.items() if newer.sure}
    return replace(previous, constraints=tuple(c for c in previous.constraints if c not in replaced))


def _said(sources: Sequence[Source], read: Sequence[Reading], *, later: Sequence[str], end: int) -> list[_Said]:
    """The sentences of users and of system messages in order, each once, at its newest place; later ones at ``end``."""
    newest: dict[str, _Said] = {}
    for source, reading in zip(sources, read, strict=True):
        for sentence, claims, key in zip(reading.sentences, reading.frames, reading.normal, strict=True):
            newest.pop(key, None)
            newest[key] = _Said(source.position, source.role, sentence, claims, key)
    for number, text in enumerate(later):
        for index, statement in enumerate(statements(text)):
            key, sentence = normal(statement), read_sentence(statement, index=index)
            newest.pop(key, None)
            newest[key] = _Said(end + number, "later", sentence, frame(sentence), key)
    return list(newest.values())


def _recency(position: int, *, end: int, over: float = RECENCY_MESSAGES) -> float:
    return exp(-max(0, end - position) / over)


def _standing(sources: Sequence[Source], *, end: int) -> list[float]:
    """What a fact of each source is still worth: the more has been said since, the less, down to a rest.

    The rest shrinks with the length of what leaves: a long history is likely to be of several tasks.
    """
    first = sources[0].position if sources else end
    rest = FLOOR * min(1.0, TASK_MESSAGES / max(1, end - first))
    return [rest + (1.0 - rest) * _recency(s.position, end=end) for s in sources]


def _spoken(
    said: Sequence[_Said], *, stale: dict[int, Successor], end: int, shown: set[str], brief: bool
) -> tuple[list[Piece], list[Piece]]:
    rules: list[Piece] = []
    talk: list[Piece] = []
    live = [s for i, s in enumerate(said) if s.role != "later" and not (i in stale and stale[i].sure)]
    labels = Counter(s.sentence.label for s in live if s.sentence.label)
    for index, one in enumerate(said):
        newer = stale.get(index)
        if one.role == "later" or one.normal in shown or (newer and newer.sure and not newer.remains):
            continue
        sentence = one.sentence
        after = said[newer.index].order if newer and not newer.remains else None
        keys = sentence.literals
        label, body = _split_label(
            sentence, text=newer.remains if newer and newer.remains else sentence.text, common=labels
        )
        if sentence.rule >= RULE_THRESHOLD:
            score = (min(sentence.rule, BRIEF_RULE) if brief else sentence.rule) + 0.5 * _recency(one.position, end=end)
            rules.append(Piece("brief" if brief else "rule", label, one.order, body, score, keys, after))
        else:
            score = (
                (1.25 if brief else 1.6)
                * (sentence.weight + 0.4 * sentence.rule)
                * (0.5 + 0.5 * _recency(one.position, end=end))
            )
            if brief and keys:
                body = telegraph(body)
            group = label or str(one.position)
            talk.append(Piece("brief" if brief else "user", group, one.order, body, score, keys, after))
    return rules, talk


def _split_label(sentence: Sentence, *, text: str, common: Counter[str]) -> tuple[str, str]:
    """A label that several sentences share is said once above them, the rest of each stays as it was."""
    label, colon, body = text.partition(":")
    if common[sentence.label] < 2 or not label.isupper():
        return "", text
    return f"{label.strip()}{colon}", body.strip()


def _retired(said: Sequence[_Said], *, stale: dict[int, Successor]) -> frozenset[str]:
    """Literals that only replaced statements hold."""
    old: set[str] = set()
    live: set[str] = set()
    for index, one in enumerate(said):
        newer = stale.get(index)
        values = one.sentence.literals
        if newer is None:
            live |= values
        elif newer.remains:
            kept = {v for v in values if v in newer.remains.lower()}
            live |= kept
            old |= values - kept
        else:
            old |= values
    return frozenset(old - live)


def _concluded(
    sources: Sequence[Source], read: Sequence[Reading], *, reader: Readings
) -> Iterator[tuple[bool, tuple[Conclusion, ...]]]:
    """Of each source whether it is a step of a task, and what it concludes; long explanations conclude nothing."""
    for n, source in enumerate(sources):
        working = (
            bool(source.calls)
            or source.is_result
            or (n > 0 and (sources[n - 1].is_result or read[n - 1].showed_output))
        )
        short = len(source.text) <= LONGEST_REPORT
        yield working, reader.conclusions(source) if working or short else ()


def _notes(
    sources: Sequence[Source], concluded: Sequence[tuple[bool, tuple[Conclusion, ...]]], *, end: int
) -> Iterator[Piece]:
    """Pieces from what the assistant concluded; an explanation to a person counts less than a step of a task."""
    newest: dict[str, Piece] = {}
    plan = max((i for i, (_, said) in enumerate(concluded) if any(c.label == "next" for c in said)), default=-1)
    for n, (source, (working, said)) in enumerate(zip(sources, concluded, strict=True)):
        for i, conclusion in enumerate(said):
            if not working and conclusion.label not in _LASTING:
                continue
            if conclusion.label == "next" and n < plan and not EMPHASIS.search(conclusion.text):
                continue
            passing = conclusion.label in _PASSING
            recency = _recency(source.position, end=end, over=STEP_MESSAGES if passing else RECENCY_MESSAGES)
            score = conclusion.weight * (1.0 if working else 0.45) * (recency if passing else 0.5 + 0.5 * recency)
            key = _likeness(conclusion)
            newest.pop(key, None)
            order = (source.position, 1_000 + i, 0)
            newest[key] = Piece("note", f"{conclusion.label}:", order, conclusion.text, 1.3 * score, conclusion.keys)
    yield from newest.values()


def _likeness(conclusion: Conclusion) -> str:
    """What two conclusions share that say the same: their words, of a mere note the first and the last of them."""
    said = normal(conclusion.text)
    if conclusion.label != "noted":
        return said
    words = said.split()
    return " ".join((*words[:4], "…", *words[-4:])) if len(words) > 8 else said


def _facts(
    sources: Sequence[Source],
    read: Sequence[Reading],
    *,
    end: int,
    retired: frozenset[str],
    told: set[str],
    labelled: bool,
    most: int,
) -> list[Piece]:
    """The ``most`` best pieces from calls, results, answers, and literals of the user's longer messages."""
    uses = _read_uses(sources, read)
    found = list(_live(sources, read))
    seen: Counter[str] = Counter()
    for _, _, reading in found:
        seen.update(reading.literals)
    last, shapes, argument_names = uses.last, uses.shapes, uses.keys
    worth = dict(zip((s.position for s in sources), _standing(sources, end=end), strict=True))
    ranked: list[tuple[float, int, int, float]] = []
    for i, (source, _, reading) in enumerate(found):
        position = source.position
        weight = worth[position]
        spoken = bool(retired) and not source.is_result
        lengths = reading.lengths
        for n, (_, key, text, _, value, keys, _, form) in enumerate(reading.passages):
            if spoken and not retired.isdisjoint(keys) and (source.role != "user" or keys <= retired):
                continue
            score = weight * value
            if text in told:
                score *= TOLD
            if text in last and last[text] > position:
                score *= 1.6 + 0.1 * min(4, uses.times[text])
            elif form in shapes:
                score *= 1.5
            if key and (key in argument_names or f"{key}s" in argument_names):
                score *= 1.3
            if len(keys) == 1:
                (only,) = keys
                score *= 1.0 + SEEN * min(5, seen[only])
            ranked.append((-score / lengths[n], i, n, score))
    ranked.sort()
    return [_fact(found[i], n, score, labelled=labelled) for _, i, n, score in ranked[:most]]


def _fact(found: tuple[Source, str, Reading], n: int, score: float, *, labelled: bool) -> Piece:
    source, heading, reading = found
    passage = reading.passages[n]
    dense = passage.kind in _DENSE
    return Piece(
        "fact",
        f"{passage.group or heading}:",
        (source.position, n, 0),
        passage.text,
        score,
        passage.keys,
        key=passage.key if labelled or not dense else "",
        record=passage.record,
        dense=dense,
    )


def _live(sources: Sequence[Source], read: Sequence[Reading]) -> Iterator[tuple[Source, str, Reading]]:
    """The messages that still count, with a heading for an answer: of a call made twice only the newest result does."""
    last_call = {(s.tool, s.arguments): s.position for s in sources if s.tool}
    asked = ""
    for source, reading in zip(sources, read, strict=True):
        if source.role == "user":
            asked = reading.question or asked
        if not source.tool or last_call[source.tool, source.arguments] == source.position:
            yield source, f"on “{asked}”" if asked else "the assistant", reading


def _read_uses(sources: Sequence[Source], read: Sequence[Reading]) -> _Uses:
    """What calls asked for; where the calls themselves are not among the sources, by the results that they got."""
    uses = _Uses()
    called = any(source.calls for source in sources)
    for source, reading in zip(sources, read, strict=True):
        if called and not source.calls:
            continue
        for ask in reading.asked:
            uses.last[ask.value] = source.position
            uses.times[ask.value] += 1
            if ask.shape:
                uses.shapes.add(ask.shape)
            if ask.key:
                uses.keys.add(ask.key.replace("_", " "))
    return uses


def _checkpoint(
    rules: Sequence[Piece], facts: Sequence[Piece], text: str, *, goal: str, previous: Checkpoint | None
) -> Checkpoint:
    """A checkpoint with every rule (never fewer than the previous one that still stand) and the ranked identifiers."""
    base = previous or Checkpoint()
    stated = tuple(dict.fromkeys((*base.constraints, *(_whole(p) for p in sorted(rules, key=lambda p: p.order)))))
    identifiers: dict[str, Identifier] = {}
    for piece in sorted(facts, key=lambda p: (-p.score, p.order)):
        if len(identifiers) >= MOST_IDENTIFIERS:
            break
        if piece.text:
            label = ", ".join(filter(None, (piece.key, piece.group.rstrip(":"))))
            identifiers.setdefault(piece.text, Identifier(piece.text, label, piece.text in text))
    return base.advance(goal=base.goal or goal, constraints=stated, identifiers=tuple(identifiers.values()))


def _whole(rule: Piece) -> str:
    return f"{rule.group} {rule.text}" if rule.group else rule.text
