"""What a user's sentence is: a standing rule, a statement of fact, small talk; and which one replaces which.

Only text of the user is ever asked about: a tool result or an answer cannot state a rule, whatever it says.
The detector is graded rather than yes or no, because a rule in unknown words must still rank above talk.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from policies.identifiers import STRONG, Kind, scan

_FENCE = re.compile(r"```[\s\S]{0,100000}?(?:```|\Z)")
_BREAK = re.compile(r"(?<=[.!?])[\"'”’)]{0,2}\s+(?=[\"'“‘(*A-Z0-9#-])|\n+")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr|St|No|approx)\.|\b[A-Z]\.|^\d{1,3}\.)\Z")
_LABEL = re.compile(r"^\s*[-*#>\s]{0,6}((?:[A-Z][A-Z_-]+)(?:[ _-][A-Z]+){0,4}|[A-Z][a-z]+(?: [a-z]+)?)\s*:\s+\S")
_RULE_LABEL = re.compile(
    r"rule|constraint|preference|requirement|policy|instruction|important|must|safety|standing|style|limit"
)
_STATE_LABEL = re.compile(r"fact|goal|state|decision|todo|status|next|note|update|reminder|context|info|fyi")

RULE_THRESHOLD = 2.0
_STRONG: tuple[tuple[re.Pattern[str], float], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), weight)
    for pattern, weight in (
        (
            r"\b(?:from (?:now|here|this point|today)(?: on| out| forward)?|going forward|henceforth|moving forward)\b",
            2.5,
        ),
        (
            r"\bfor the (?:rest|remainder|duration) of\b|\bthroughout (?:this|our|the) (?:session|chat|conversation)\b",
            2.5,
        ),
        (
            r"\b(?:under|in) no circumstances\b|\bno matter what\b|\bat all times\b|\bwithout exceptions?\b|\boff[- ]limits\b",
            2.5,
        ),
        (r"\b(?:always|never|ever)\b", 2.0),
        (
            r"\b(?:do not|don['’]?t|must not|mustn['’]?t|may not|should not|shouldn['’]?t|cannot|shall not|won['’]t be)\b",
            1.6,
        ),
        (
            r"\b(?:must|shall|required to|has to be|have to be|needs? to be|forbidden|prohibited|not allowed|only allowed)\b",
            1.6,
        ),
        (
            r"\b(?:avoid|refrain|hold off|steer clear|stay away|stick (?:to|with)|limit yourself|restrict|omit|leave out|skip)\b",
            1.5,
        ),
        (
            r"\b(?:make sure|be sure to|ensure|see to it|keep in mind|bear in mind|remember (?:to|that you|not)|take care)\b",
            1.6,
        ),
        (
            r"\b(?:i['’]?d|i would|we['’]?d|we would) (?:rather|prefer|appreciate|like (?:you|it if|all|every|your)|want)\b",
            2.0,
        ),
        (
            r"\b(?:i|we) (?:really |strongly )?(?:prefer|insist|expect you|want you|need you|(?:want|like|need) (?:my|all|every|each|your|the) "
            r"\w+ (?:to|in|as)|don['’]?t (?:want|like|need)|never want|only want|always want|hate)\b",
            2.0,
        ),
        (
            r"\b(?:my|the user['’]?s?|user['’]?s|our|user) (?:preferences?|preferred|rules?|wants?|prefers?|needs?)\b",
            2.0,
        ),
        (
            r"\b(?:every|each|any|all) (?:\w+ ){0,2}(?:reply|replies|response|responses|answers?|messages?|outputs?|time|step|tasks?|numbers?|code)\b",
            1.3,
        ),
        (
            r"\b(?:whenever|anytime|any time|every time|each time)\b|\b(?:when|before|after|if|while|once|unless|until) you\b",
            1.5,
        ),
        (
            r"\b(?:your|you) (?:\w+ )?(?:reply|replies|response|responses|answers?|messages?|outputs?|sentences?|tone|words?)\b",
            1.0,
        ),
        (
            r"\b(?:instead of|rather than|not (?:as|in|the|a|any)\b|no longer|no more than|at most|at least|or less|or fewer|exactly|strictly)\b",
            0.9,
        ),
        (r"\b(?:only|nothing else|nobody else|exclusively|solely)\b|\bjust (?:do|go|give|use|tell|the)\b", 1.0),
        (
            r"\b(?:without|needs?|requires?) (?:\w+ ){0,4}(?:approv\w+|permission|confirm\w*|ask\w*|go-ahead|consent|check\w*|operator|review)\b",
            1.5,
        ),
        (
            r"\b(?:on my behalf|my go-ahead|my approval|check with me|ask me|run it by me|wait for (?:me|my)|let me (?:approve|review|see|send))\b",
            1.3,
        ),
        (r"\b(?:stop|quit|cease) \w+ing\b|^no \w+|[,;:] no \w+|[,;] not \w+", 1.2),
        (
            r"\b(?:should (?:be|stay|remain|have|use|come|end|start|never|always)|stay(?:s)? (?:out|free|within|under|below|private|away)|"
            r"keep(?:ing)? (?:\w+ ){1,4}(?:out|away|private|secret|short|brief|simple|under|below|within|to)|capped|ceiling|cap is|deadline)\b",
            1.2,
        ),
        (r"\b(?:confidential|secret|private|sensitive|personal (?:data|info\w*)|disclos\w+|reveal\w*|password)\b", 0.8),
    )
)
_IMPERATIVE = re.compile(
    r"^(?:(?:and|also|oh|ok|okay|so|please|kindly|just|one (?:more )?thing|by the way|btw|note|remember|important|quick update|"
    r"(?:[A-Z][A-Z _-]{2,30}))[,:]? (?:that )?){0,3}"
    r"(?:use|write|reply|respond|answer|end|finish|close|start|begin|open|keep|call|address|put|include|add|format|sign|cite|quote|show|"
    r"ask|speak|talk|give|leave|skip|treat|assume|round|convert|report|send|run|check|confirm|wait|draft|restate|repeat|express|spell|"
    r"pick|choose|favor|favour|prefer|stick|avoid|refrain|do|don['’]?t|never|always|let|make|ensure|limit|mention|name|state|list|tell|"
    r"search|look|verify|double-check|test|commit|log|record|save|store|delete|touch|open|read|refer|return|output|print|provide|"
    r"translate|summari[sz]e|explain|think|stop|hold|stay|be|have|go|get|set|mark|prefix|append|wrap|indent|number|no)\b",
    re.IGNORECASE,
)
_FIRST_PERSON = re.compile(
    r"\b(?:i|we|they|he|she|it|that|this|which|there|my \w+|who)(?: \w+ly| also| just| still| really)? "
    r"(?:do not|don['’]?t|can(?:not|['’]t)|never|always|must|should(?:n['’]t| not)?|only|ever|avoid|have to|need to|skip|just)\b",
    re.IGNORECASE,
)
_WISH = re.compile(r"\b(?:i|we) (?:don['’]?t|never|only|always|just) (?:want|like|need|accept|work)\b", re.IGNORECASE)
_SELF = re.compile(r"\b(?:i|i['’](?:m|ve|d|ll)|my|mine|we|our|we['’](?:re|ve)|me|us)\b", re.IGNORECASE)
_REQUEST = re.compile(
    r"^(?:can|could|would|will|do|does|did|is|are|what|which|how|why|where|when|who|any|have) |\b(?:can|could|would) you\b|"
    r"\bdo you (?:have|know|think|recommend)\b|\bwondering if\b|\b(?:looking for|help me)\b",
    re.IGNORECASE,
)
_TALK = re.compile(
    r"^(?:thanks?(?: you)?|ok(?:ay)?|yes|no|sure|great|perfect|got it|sounds good|hi|hello|hey|cool|nice|wow|that['’]s|"
    r"these? (?:sounds?|are|is)|i (?:like|love) (?:the|that|this)|i(?:['’]ll| will) (?:definitely|check|try|keep))\b",
    re.IGNORECASE,
)
_CHANGE = re.compile(
    r"\b(?:now|update[ds]?|change[ds]?|moved|switched|new|instead|no longer|rotated|retired|rebased|renamed|replaced?|replaces|"
    r"actually|correction|corrected|from now on|going forward|rather|revised|previous(?:ly)?|used to|postponed|migrated|raised|lowered|"
    r"scratch that|current(?:ly)?|latest|recently|as of)\b",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"\b(?:no|not|never|don['’]?t|cannot|without|avoid|mustn['’]?t)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]{1,30}")

ATTRIBUTES: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "money": "budget cap capped spend spending cost costs expense expenses ceiling price limit dollars euros",
        "date": "deadline date due launch release ship ships shipping schedule scheduled timing freeze",
        "codename": "codename code-name named called calling label designated designation alias",
        "timezone": "timezone time-zone times timestamp timestamps clock clocks utc pacific gmt",
        "owner": "on-call oncall owner owns pager rotation duty escalation assignee",
        "approver": "approver approve approves approval approving",
        "branch": "branch branches rebased",
        "commit": "commit revision",
        "phase": "phase stage milestone progress",
        "next": "next",
        "style": "style tone answers answer replies reply responses response",
        "secret": "code password passcode pin secret token vault",
        "region": "region zone hosted",
        "address": "url endpoint host address lives",
        "language": "language languages examples",
        "report": "weekly report",
        "tool": "tool purge",
        "version": "version",
    }.items()
}
_FUNCTION_WORDS = frozenset(
    "the a an is are was were be been of to at by it its this that we i our as so there has have had will would us".split()
)
_STOP = frozenset(
    "the a an and or but of to in on at for from by with is are was were be been being it its this that these those "
    "i me my we our us you your he she they them their his her as so if then than not no never always do does don't "
    "will would can could should must may might have has had just also any all every each only still now new old "
    "please get got about into over under out up down there here what which who when where how more most very really "
    "one some keep use user wants stay project current currently update updated moved changed day today going go let".split()
)


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


def telegraph(sentence: str) -> str:
    """The sentence without words that carry no meaning of their own; what it negates or states stays."""
    kept: list[str] = []
    at = 0
    for mention in scan(sentence):
        kept += [w for w in sentence[at : mention.start].split() if w.lower().strip(".,") not in _FUNCTION_WORDS]
        kept.append(mention.value)
        at = mention.start + len(mention.value)
    kept += [w for w in sentence[at:].split() if w.lower().strip(".,") not in _FUNCTION_WORDS]
    return " ".join(kept)


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
        grade *= 0.35
    elif _REQUEST.search(body) and grade < 3:
        grade *= 0.7
    if len(sentence) > 300:
        grade *= 0.6
    return round(grade, 2)


def telling(sentence: str, *, label: str = "") -> float:
    """How much a user's sentence tells: facts about the user and literals weigh most, questions and talk least."""
    kinds = [m.kind for m in scan(sentence[:600])]
    weight = 1.0 + min(1.2, 0.5 * sum(k in STRONG or k in {Kind.QUANTITY, Kind.NUMBER, Kind.TIME} for k in kinds))
    weight += min(0.6, 0.25 * sum(k in {Kind.NAME, Kind.QUOTE} for k in kinds))
    if label:
        weight += 1.5 if _STATE_LABEL.search(label) or _RULE_LABEL.search(label) or label.isupper() else 0.4
    if _SELF.search(sentence):
        weight += 0.5
    if _CHANGE.search(sentence):
        weight += 0.3
    if sentence.rstrip().endswith("?") or _REQUEST.search(sentence):
        weight *= 0.45 if len(kinds) < 2 else 0.7
    if _TALK.match(sentence):
        weight *= 0.5
    return weight


def read_sentences(text: str, *, position: int) -> tuple[Sentence, ...]:
    """The graded sentences of one user message."""
    return tuple(
        Sentence(piece, position, index, rule_grade(piece), telling(piece, label=label_of(piece)), label_of(piece))
        for index, piece in enumerate(_join_labelled(sentences(text)))
        if len(piece) > 1
    )


def _join_labelled(pieces: Sequence[str]) -> tuple[str, ...]:
    """A sentence after a labelled one belongs to it: they state one thing and are replaced together."""
    joined: list[str] = []
    for piece in pieces:
        last = joined[-1] if joined else ""
        if last[:2].isupper() and label_of(last) and not label_of(piece) and len(last) + len(piece) < 240:
            joined[-1] = f"{last} {piece}"
        else:
            joined.append(piece)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class _Frame:
    words: frozenset[str]
    values: frozenset[str]
    attributes: frozenset[str]
    changes: bool
    negative: bool


def _stem(word: str) -> str:
    word = word.lower().replace("’", "'").removesuffix("'s")
    for suffix in ("ing", "ed", "es", "s"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 4:
            return word[: -len(suffix)]
    return word


def _frame(sentence: Sentence) -> _Frame:
    body = sentence.text.partition(":")[2] if sentence.label.isalpha() or " " in sentence.label else sentence.text
    mentions = [m for m in scan(body) if m.kind in STRONG or m.kind in {Kind.QUANTITY, Kind.NUMBER, Kind.NAME}]
    values = frozenset(m.value.lower() for m in mentions if m.kind is not Kind.NAME or m.start > 1)
    parts = frozenset(p for v in values for p in re.findall(r"[a-z'-]+", v))
    raw = [w.lower() for w in _WORD.findall(body)]
    words = frozenset(_stem(w) for w in raw if w not in _STOP and w not in parts)
    attributes = frozenset(name for name, known in ATTRIBUTES.items() if known.intersection(raw))
    return _Frame(words, values, attributes, bool(_CHANGE.search(sentence.text)), bool(_NEGATIVE.search(body)))


def superseded(statements: Sequence[Sentence]) -> dict[int, bool]:
    """Indices of statements that a later one replaces: True for surely, False for probably.

    A later statement replaces an earlier one when both say the same thing about the same subject with another
    value, or when it announces a change of an attribute (date, amount, owner, …) of the same subject. Two
    prohibitions that differ in one word may both stand, so such pairs are only "probably".
    """
    frames = [_frame(s) for s in statements]
    frequency = Counter(word for frame in frames for word in frame.words)
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    gone: dict[int, bool] = {}
    for index, frame in enumerate(frames):
        keys = sorted({*(w for w in frame.words if frequency[w] <= 12), *(f"@{a}" for a in frame.attributes)})
        for older in sorted({j for key in keys for j in by_key[key][-24:]}):
            verdict = _replaces(frames[older], frame, pair=(statements[older], statements[index]), frequency=frequency)
            if verdict is not None:
                gone[older] = gone.get(older, False) or verdict
        for key in keys:
            by_key[key].append(index)
    return gone


def _replaces(old: _Frame, new: _Frame, *, pair: tuple[Sentence, Sentence], frequency: Counter[str]) -> bool | None:
    labelled = bool(pair[0].label) and pair[0].label == pair[1].label
    rules = pair[0].rule >= RULE_THRESHOLD and pair[1].rule >= RULE_THRESHOLD
    shared = old.words & new.words
    only_old, only_new = old.words - new.words, new.words - old.words
    attributes = old.attributes & new.attributes
    differs = bool(old.values and new.values and not (old.values & new.values))
    attribute_words = {_stem(w) for a in attributes for w in ATTRIBUTES[a]}
    if differs and shared and not ((only_old | only_new) - attribute_words) and len(shared) >= 1:
        return not (old.negative and new.negative) or new.changes
    if new.changes and attributes:
        scopes_old, scopes_new = old.words - attribute_words, new.words - attribute_words
        common = scopes_old & scopes_new
        if old.values & new.values:
            return None
        if common or not scopes_old or not scopes_new or (attributes & _SINGULAR and not _distinct(only_old, only_new)):
            return True
    if (labelled or not rules) and shared and pair[0].label == pair[1].label:
        rare = sum(1 for w in shared if frequency[w] <= 4)
        alike = differs or labelled or len(only_old) == len(only_new) == 1
        if alike and (rare >= 2 or len(shared) >= 3 or (attributes and differs)):
            return None if _distinct(only_old, only_new) else False
    return None


_SINGULAR = frozenset({"codename", "timezone", "owner", "branch", "style", "secret", "phase"})
_CONTRASTS: tuple[frozenset[str], ...] = tuple(
    frozenset(_stem(w) for w in words.split())
    for words in (
        "production staging development test testing qa sandbox local",
        "primary secondary backup replica fallback main",
        "unit integration smoke acceptance functional",
        "travel trip project conference marketing hardware launch documentation docs product release design team",
        "morning afternoon evening night weekly daily monthly",
        "source target input output read write client server frontend backend",
        "home work office mobile billing shipping",
    )
)


def _distinct(only_old: frozenset[str], only_new: frozenset[str]) -> bool:
    """True where the two differ in words that set subjects apart (production and staging, unit and integration)."""
    return any(group & only_old and group & only_new for group in _CONTRASTS)
