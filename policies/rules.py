"""What a user's sentence is: a standing rule, a statement of fact, or small talk.

Only text of the user is ever asked about: a tool result or an answer cannot state a rule, whatever it says.
The detector is graded rather than yes or no, because a rule in unknown words must still rank above talk.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.identifiers import STRONG, Kind, Mention, scan

_FENCE = re.compile(r"```[\s\S]{0,100000}?(?:```|\Z)")
_BREAK = re.compile(r"(?<=[.!?])[\x22'”\u2019)]{0,2}\s+(?=[\x22'“\u2018(*A-Z0-9#-])|\n+")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr|St|No|approx)\.|\b[A-Z]\.|^\d{1,3}\.)\Z")
_LABEL = re.compile(r"^\s*[-*#>\s]{0,6}((?:[A-Z][A-Z_-]+)(?:[ _-][A-Z]+){0,4}|[A-Z][a-z]+(?: [a-z]+)?)\s*:\s+\S")
_RULE_LABEL = re.compile(
    r"rule|constraint|preference|requirement|policy|instruction|important|must|safety|standing|style|limit"
)
_STATE_LABEL = re.compile(r"fact|goal|state|decision|todo|status|next|note|update|reminder|context|info|fyi")

RULE_THRESHOLD = 1.6
_STRONG: tuple[tuple[re.Pattern[str], float], ...] = tuple(
    (re.compile("|".join(alternatives), re.IGNORECASE), weight)
    for weight, alternatives in (
        (
            2.5,
            (
                (
                    r"\b(?:from (?:now|here|this point|today)(?: on| out| forward)?|going forward|henceforth|"
                    r"moving forward)\b"
                ),
            ),
        ),
        (
            2.5,
            (
                r"\bfor the (?:rest|remainder|duration) of\b",
                r"\bthroughout (?:this|our|the) (?:session|chat|conversation)\b",
            ),
        ),
        (
            2.5,
            (
                r"\b(?:under|in|on) no (?:circumstances?|conditions?|account)\b|\bno matter what\b",
                r"\bat all times\b|\bwithout exceptions?\b|\boff[- ]limits\b",
            ),
        ),
        (2.0, (r"\b(?:always|never|ever)\b",)),
        (
            1.6,
            (
                (
                    r"\b(?:do not|don['\u2019]?t|must not|mustn['\u2019]?t|may not|should not|shouldn['\u2019]?t|"
                    r"cannot|shall not|won['\u2019]t be)\b"
                ),
            ),
        ),
        (
            1.6,
            (
                (
                    r"\b(?:must|shall|required to|has to be|have to be|needs? to be|forbidden|prohibited|not allowed|"
                    r"only allowed)\b"
                ),
            ),
        ),
        (
            1.5,
            (
                (
                    r"\b(?:avoid|refrain|hold off|steer clear|stay away|stick (?:to|with)|limit yourself|restrict|"
                    r"omit|leave out|skip)\b"
                ),
            ),
        ),
        (
            1.6,
            (
                (
                    r"\b(?:make sure|be sure to|ensure|see to it|keep in mind|bear in mind|remember (?:to|that you|"
                    r"not)|take care)\b"
                ),
            ),
        ),
        (
            2.0,
            (
                (
                    r"\b(?:i['\u2019]?d|i would|we['\u2019]?d|we would) (?:rather|prefer|appreciate|like (?:you|it if|"
                    r"all|every|your)|want)\b"
                ),
            ),
        ),
        (
            2.0,
            (
                (
                    r"\b(?:i|we) (?:really |strongly )?(?:prefer|insist|expect you|want you|need you|(?:want|like|"
                    r"need) (?:my|all|every|each|your|the) \w+ (?:to|in|as)|don['\u2019]?t (?:want|like|need)|"
                    r"never want|only want|always want|hate)\b"
                ),
            ),
        ),
        (
            2.0,
            (
                (
                    r"\b(?:my|the user['\u2019]?s?|user['\u2019]?s|our|user) (?:preferences?|preferred|rules?|wants?|"
                    r"prefers?|needs?)\b"
                ),
            ),
        ),
        (
            1.3,
            (
                (
                    r"\b(?:every|each|any|all) (?:\w+ ){0,2}(?:reply|replies|response|responses|answers?|messages?|"
                    r"outputs?|time|step|tasks?|numbers?|code)\b"
                ),
            ),
        ),
        (
            1.5,
            (
                r"\b(?:whenever|anytime|any time|every time|each time)\b",
                r"\b(?:when|before|after|if|while|once|unless|until) you\b",
            ),
        ),
        (
            1.0,
            (
                (
                    r"\b(?:your|you) (?:\w+ )?(?:reply|replies|response|responses|answers?|messages?|outputs?|"
                    r"sentences?|tone|words?)\b"
                ),
            ),
        ),
        (
            0.9,
            (
                (
                    r"\b(?:instead of|rather than|not (?:as|in|the|a|any)\b|no longer|no more than|at most|at least|"
                    r"or less|or fewer|exactly|strictly)\b"
                ),
            ),
        ),
        (1.0, (r"\b(?:only|nothing else|nobody else|exclusively|solely)\b|\bjust (?:do|go|give|use|tell|the)\b",)),
        (
            1.5,
            (
                (
                    r"\b(?:without|needs?|requires?) (?:\w+ ){0,4}(?:approv\w+|permission|confirm\w*|ask\w*|go-ahead|"
                    r"consent|check\w*|operator|review)\b"
                ),
            ),
        ),
        (
            1.3,
            (
                (
                    r"\b(?:on my behalf|my go-ahead|my approval|check with me|ask me|run it by me|wait for (?:me|my)|"
                    r"let me (?:approve|review|see|send))\b"
                ),
            ),
        ),
        (1.2, (r"\b(?:stop|quit|cease) \w+ing\b|^no \w+|[,;:] no \w+|[,;] not \w+",)),
        (
            1.2,
            (
                (
                    r"\b(?:should (?:be|stay|remain|have|use|come|end|start|never|always)|stay(?:s)? (?:out|free|"
                    r"within|under|below|private|away)|keep(?:ing)? (?:\w+ ){1,4}(?:out|away|private|secret|short|"
                    r"brief|simple|under|below|within|to)|capped|ceiling|cap is|deadline)\b"
                ),
            ),
        ),
        (1.6, (r"\b(?:important|essential|crucial|vital) (?:to me |for me )?(?:that|to)\b",)),
        (
            1.6,
            (
                r"\b(?:please|kindly) (?:don['\u2019]?t|do not|not|never|no)\b",
                r"\byou (?:please )?(?:not|never|always)\b",
            ),
        ),
        (2.0, (r"\b(?:nothing|nobody|no one|none)\b.{0,60}\b(?:without|unless|until|except)\b",)),
        (1.6, (r"\bwithout my (?:ok(?:ay)?|permission|consent|approval|say-so|knowledge)\b",)),
        (2.0, (r"\bi (?:\w+ )?(?:want|need|like|expect) to (?:approve|see|review|check|confirm|know|sign off)\b",)),
        (2.0, (r"\bi (?:\w+ )?(?:like|want|need|take) (?:my|all|every|each|things|it)\b",)),
        (
            1.6,
            (
                r"\b(?:leave|keep|take|cut) .{1,40}\bout\b",
                r"\b(?:untouchable|hands off|out of bounds|do not touch|taboo)\b",
            ),
        ),
        (2.0, (r"\b(?:allerg\w+|intoleran\w+|vegan|vegetarian|colou?r-?blind|diabetic|kosher|halal)\b",)),
        (1.5, (r"^(?:when(?:ever)?|while|for) (?:\w+ ){0,3}\w+ing\b|\bwhen \w+ing\b|\bwhenever\b",)),
        (1.3, (r"\b(?:prior to|before) (?:\w+ )?(?:\w+ing|you|any|the answer)\b|\beven (?:when|if|for|though)\b",)),
        (1.0, (r"(?:^| )(?:first|please|thanks|for me|thank you)(?:, (?:please|thanks|thank you))?[.!]?$",)),
        (1.0, (r"^all \w+|^\w+ (?:\w+ )?for me\b|^\w+(?: \w+)?, (?:not|no) \w+|\b\w+ over \w+(?: \w+)? when\b",)),
        (
            0.8,
            (
                (
                    r"\b(?:metric|imperial|celsius|fahrenheit|bullets?(?: points?)?|emojis?|markdown|numerals?|"
                    r"digits?|formal|informal)\b"
                ),
            ),
        ),
        (
            0.8,
            (
                (
                    r"\b(?:confidential|secret|private|sensitive|personal (?:data|info\w*)|disclos\w+|reveal\w*|"
                    r"password)\b"
                ),
            ),
        ),
    )
)
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
    """One sentence of the user at message ``position``, the ``index``-th of its message.

    ``rule`` grades how much it reads as a standing rule (2 and more: surely), ``weight`` how much it tells.
    """

    text: str
    position: int
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
    freed = body if _WISH.search(body) else _FIRST_PERSON.sub(" ", body)
    grade += min(5.0, sum(weight for pattern, weight in _STRONG if pattern.search(freed)))
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


def read_sentence(text: str, *, position: int, index: int) -> Sentence:
    """One sentence of the user's message at ``position``, graded."""
    label, mentions = label_of(text), scan(text[:600])
    weight = telling(text, mentions=mentions, label=label)
    return Sentence(text, position, index, rule_grade(text), weight, label, mentions)


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
