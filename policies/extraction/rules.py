"""What a user's sentence is: a standing rule, a statement of fact, or small talk.

Only text of the user is ever asked about: a tool result or an answer cannot state a rule, whatever it says.
The detector is graded rather than yes or no, because a rule in unknown words must still rank above talk.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.extraction.identifiers import STRONG, Kind, Mention, scan
from policies.extraction.signs import signs

_FENCE = re.compile(r"```[\s\S]{0,100000}?(?:```|\Z)")
_BREAK = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\x22'”\u2019)])|(?<=[.!?][\x22'”\u2019)]{2}))\s+(?=[\x22'“\u2018(*A-Z0-9#-])|\n+"
)
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr|St|No|approx)\.|\b[A-Z]\.|^\d{1,3}\.)\Z")
_LABEL = re.compile(r"^\s*[-*#>\s]{0,6}((?:[A-Z][A-Z_-]+)(?:[ _-][A-Z]+){0,4}|[A-Z][a-z]+(?: [a-z]+)?)\s*:\s+\S")
_RULE_LABEL = re.compile(
    r"rule|constraint|preference|requirement|policy|instruction|important|must|safety|standing|style|limit"
)
_STATE_LABEL = re.compile(r"fact|goal|state|decision|todo|status|next|note|update|reminder|context|info|fyi")

RULE_THRESHOLD = 1.6
_IMPERATIVE = re.compile(
    r"^(?:(?:and|also|oh|ok|okay|so|please|kindly|just|one (?:more )?thing|by the way|btw|note|"
    r"remember|important|quick update|(?:[A-Z][A-Z _-]{2,30}))[,:]? (?:that )?){0,3}(?:use|write|"
    r"reply|respond|answer|end|finish|close|start|begin|open|keep|call|address|put|include|add|format|"
    r"sign|cite|quote|show|ask|speak|talk|give|leave|skip|treat|assume|round|convert|report|send|run|"
    r"check|confirm|wait|draft|restate|repeat|express|spell|pick|choose|favor|favour|prefer|sign|wrap|"
    r"google|stick|avoid|refrain|do|don['\u2019]?t|never|always|let|make|ensure|limit|mention|name|"
    r"state|list|tell|search|look|verify|double-check|test|commit|log|record|save|store|delete|touch|"
    r"open|read|refer|return|output|print|provide|translate|summari[sz]e|explain|think|stop|hold|stay|"
    r"be|have|go|get|set|mark|prefix|append|wrap|indent|number|no)\b",
    re.IGNORECASE,
)
_FIRST_PERSON = re.compile(
    r"\b(?:(?:i|we|they)['\u2019]ve|i|we|they|he|she|it|that|this|which|there|my \w+|who)(?: \w+ly|"
    r" also| just| still| really)? (?:do not|don['\u2019]?t|can(?:not|['\u2019]t)|never|always|must|"
    r"should(?:n['\u2019]t| not)?|only|ever|avoid|have to|need to|skip|just)\b",
    re.IGNORECASE,
)
_WISH = re.compile(
    r"\b(?:i|we) (?:don['\u2019]?t|never|only|always|just) (?:want|like|need|accept|work)\b", re.IGNORECASE
)
_SELF = re.compile(r"\b(?:i|i['\u2019](?:m|ve|d|ll)|my|mine|we|our|we['\u2019](?:re|ve)|me|us)\b", re.IGNORECASE)
_REQUEST = re.compile(
    r"^(?:can|could|would|will|do|does|did|is|are|what|which|how|why|where|when|who|any|have) |"
    r"\b(?:can|could|would) you\b|\bdo you (?:have|know|think|recommend)\b|\bwondering if\b|"
    r"\b(?:looking for|help me)\b",
    re.IGNORECASE,
)
_POLITE = re.compile(
    r"\b(?:can|could|would|will) you (?:please |kindly )?(?!recommend|suggest|tell|help|explain)\w+", re.IGNORECASE
)
_TALK = re.compile(
    r"^(?:thanks?(?: you)?|ok(?:ay)?|yes|no|sure|great|perfect|got it|sounds good|hi|hello|hey|cool|"
    r"nice|wow|that['\u2019]s|these? (?:sounds?|are|is)|i (?:like|love) (?:the|that|this)|"
    r"i(?:['\u2019]ll| will) (?:definitely|check|try|keep))\b",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"(?:that|this|it|these|those|neither|none|either|both|one)(?: \w+){0,5} works?\b"
    r"|(?:i )?(?:apologi[sz]e|am sorry)\b"
    r"|(?:neither|none) of (?:those|these|them)\b",
    re.IGNORECASE,
)
_PROMISE = re.compile(
    r"(?:[\w ]{1,20}, )?(?:i|we)(?:['\u2019]ll| will) (?:make sure|be sure|remember|take care)\b", re.IGNORECASE
)
CHANGE = re.compile(
    r"\b(?:now|update[ds]?|change[ds]?|moved|switched|new|instead|no longer|rotated|retired|rebased|"
    r"renamed|replaced?|replaces|actually|correction|corrected|from now on|going forward|rather|"
    r"revised|previous(?:ly)?|used to|postponed|migrated|raised|lowered|scratch that|"
    r"latest|recently|as of)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019-]{1,30}")

_STOPS = (
    "the a an and or but of to in on at for from by with is are was were be been being it its this that these "
    "those i me my we our us you your he she they them their his her as so if then than not no never always do "
    "does don't will would can could should must may might have has had just also any all every each only still "
    "now new old please get got about into over under out up down there here what which who when where how more "
    "most very really one some keep use user wants stay current currently update updated moved changed "
    "day today going go let way lately think thinking thought learn learning interested interest particularly "
    "especially recommend wondering want wanted like try trying definitely resources help find good great "
    "speaking "
)
STOP = frozenset(_STOPS.split())


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence of the user, the ``index``-th of its message.

    ``rule`` grades how much it reads as a standing rule (2 and more: surely), ``weight`` how much it tells.
    """

    text: str
    index: int
    rule: float
    weight: float
    label: str = ""
    mentions: tuple[Mention, ...] = ()

    @property
    def literals(self) -> frozenset[str]:
        """Its literals in small letters."""
        return frozenset(m.value.lower() for m in self.mentions)


def sentences(text: str, *, longest: int = 600) -> tuple[str, ...]:
    """The sentences and lines of ``text``, verbatim, outside code fences; longer ones are cut at a blank."""
    pieces: list[str] = []
    for part in _BREAK.split(_FENCE.sub("\n", text)):
        part = part.strip()
        if pieces and _ABBREVIATION.search(pieces[-1]) and len(pieces[-1]) < longest:
            pieces[-1] = f"{pieces[-1]} {part}"
        elif part:
            pieces.append(part)
    return tuple(piece for part in pieces for piece in _chop(part, longest))


def _chop(part: str, longest: int) -> list[str]:
    chunks: list[str] = []
    while len(part) > longest:
        cut = part.rfind(" ", longest // 2, longest)
        cut = cut if cut > 0 else longest
        chunks.append(part[:cut])
        part = part[cut:].lstrip()
    return [*chunks, part] if part else chunks


def label_of(sentence: str) -> str:
    """The words before a leading colon, small; empty where the sentence starts otherwise."""
    match = _LABEL.match(sentence)
    return match.group(1).lower() if match else ""


def rule_grade(sentence: str) -> float:
    """How much a user's sentence reads as a standing rule: 0 not at all, 2 and more surely."""
    label = label_of(sentence)
    body = sentence.partition(":")[2].strip() if label else sentence
    grade = 3.0 if label and _RULE_LABEL.search(label) else 0.0
    found = signs(body)
    if found and not _WISH.search(body):
        found = signs(_FIRST_PERSON.sub(" ", body))
    if _ANSWER.match(body) or _PROMISE.match(body):
        found = max(0.0, found - 2.0)
    grade += min(5.0, found)
    if _IMPERATIVE.match(body):
        grade += 0.8
    if sentence.rstrip().endswith("?"):
        grade *= 1.0 if _POLITE.search(body) else 0.35
    elif _REQUEST.search(body) and grade < 3:
        grade *= 0.7
    if len(sentence) > 300:
        grade *= 0.6
    return round(grade, 2)


def telling(sentence: str, *, mentions: Sequence[Mention] = (), label: str = "") -> float:
    """How much a user's sentence tells: facts about the user and literals weigh most, questions and talk least."""
    kinds = [m.kind for m in mentions]
    content = sum(1 for w in WORD.findall(sentence[:600]) if len(w) > 3 and w.lower() not in STOP)
    weight = min(1.0, 0.2 * content) + min(
        1.2, 0.5 * sum(k in STRONG or k in {Kind.QUANTITY, Kind.NUMBER, Kind.TIME} for k in kinds)
    )
    weight += min(0.6, 0.25 * sum(k in {Kind.NAME, Kind.QUOTE} for k in kinds))
    if label:
        weight += 1.5 if _STATE_LABEL.search(label) or _RULE_LABEL.search(label) or label.isupper() else 0.4
    if _SELF.search(sentence):
        weight += 0.5
    if CHANGE.search(sentence):
        weight += 0.3
    if sentence.rstrip().endswith("?") or _REQUEST.search(sentence):
        weight *= 0.45 if len(kinds) < 2 else 0.7
    if _TALK.match(sentence):
        weight *= 0.5
    return weight


def read_sentence(text: str, *, index: int) -> Sentence:
    """One sentence of a user's message, graded."""
    label, mentions = label_of(text), scan(text[:600])
    weight = telling(text, mentions=mentions, label=label)
    return Sentence(text, index, rule_grade(text), weight, label, mentions)


def statements(text: str) -> tuple[str, ...]:
    """The sentences of a user's message; one that follows a labelled one belongs to it, they are replaced together."""
    return _join_labelled([piece for piece in sentences(text) if len(piece) > 1])


def _join_labelled(pieces: Sequence[str]) -> tuple[str, ...]:
    joined: list[str] = []
    for piece in pieces:
        last = joined[-1] if joined else ""
        if last[:2].isupper() and label_of(last) and not label_of(piece) and len(last) + len(piece) < 240:
            joined[-1] = f"{last} {piece}"
        else:
            joined.append(piece)
    return tuple(joined)
