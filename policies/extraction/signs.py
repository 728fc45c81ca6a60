"""Signs of a standing rule in a sentence, and what each adds to its grade.

Each sign names words of which one is always in it, so that a sentence is searched only for signs that it can show.
"""

import re
from functools import cache

_SIGNS: tuple[tuple[float, str, str], ...] = (
    (2.5, "from", r"\bfrom (?:now|here|this point|today)(?: on| out| forward)?\b"),
    (2.5, "going moving henceforth", r"\b(?:going forward|henceforth|moving forward)\b"),
    (
        2.5,
        "for throughout",
        r"\bfor the (?:rest|remainder|duration) of\b|\bthroughout (?:this|our|the) (?:session|chat|conversation)\b",
    ),
    (
        2.5,
        "circumstance circumstances condition conditions account matter times exception exceptions limits",
        (
            r"\b(?:under|in|on) no (?:circumstances?|conditions?|account)\b|\bno matter what\b|\bat all times\b"
            r"|\bwithout exceptions?\b|\boff[- ]limits\b"
        ),
    ),
    (2.0, "always never ever", r"\b(?:always|never|ever)\b"),
    (
        1.6,
        "not don dont mustn mustnt shouldn shouldnt cannot won wont",
        (
            r"\b(?:do not|don['\u2019]?t|must not|mustn['\u2019]?t|may not|should not|shouldn['\u2019]?t|cannot"
            r"|shall not"
            r"|won['\u2019]t be)\b"
        ),
    ),
    (
        1.6,
        "must shall required has have needs need forbidden prohibited allowed",
        (
            r"\b(?:must|shall|required to|has to be|have to be|needs? to be|forbidden|prohibited|not allowed|only"
            r" allowed)\b"
        ),
    ),
    (
        1.5,
        "avoid refrain hold steer stay stick limit restrict omit leave skip",
        (
            r"\b(?:avoid|refrain|hold off|steer clear|stay away|stick (?:to|with)|limit yourself|restrict|omit|leave"
            r" out|skip)\b"
        ),
    ),
    (
        1.6,
        "make sure ensure see keep bear remember take",
        (
            r"\b(?:make sure|be sure to|ensure|see to it|keep in mind|bear in mind|remember (?:to|that you|not)|take"
            r" care)\b"
        ),
    ),
    (
        2.0,
        "rather prefer appreciate like want",
        (
            r"\b(?:i['\u2019]?d|i would|we['\u2019]?d|we would) (?:rather|prefer|appreciate|like (?:you|it if|all"
            r"|every|your)|want)\b"
        ),
    ),
    (
        2.0,
        "prefer insist expect want need like don dont never only always hate",
        (
            r"\b(?:i|we) (?:really |strongly )?(?:prefer|insist|expect you|want you|need you|(?:want|like|need)"
            r" (?:my|all|every"
            r"|each|your|the) \w+ (?:to|in|as)|don['\u2019]?t (?:want|like|need)|never want|only want|always want"
            r"|hate)\b"
        ),
    ),
    (
        2.0,
        "can couldn read speak drink eat wear stand bear",
        (
            r"\bi (?:can['\u2019]?t|cannot|couldn['\u2019]?t) (?:stand|bear|eat|drink|have|abide)\b"
            r"|\bi (?:only )?(?:read|speak|eat|drink|wear) .{1,40}\bonly\b|\bi only (?:read|speak|eat|drink|wear)\b"
        ),
    ),
    (
        2.0,
        "interest business concern",
        r"\b(?:of no (?:interest|use|concern)|none of (?:his|her|their|your) business)\b",
    ),
    (
        2.0,
        "preference preferences preferred rule rules want wants prefer prefers need needs",
        (
            r"\b(?:my|the user['\u2019]?s?|user['\u2019]?s|our|user) (?:preferences?|preferred|rules?|wants?|prefers?"
            r"|needs?)\b"
        ),
    ),
    (
        1.3,
        "every each any all",
        (
            r"\b(?:every|each|any|all) (?:\w+ ){0,2}(?:reply|replies|response|responses|answers?|messages?"
            r"|outputs?|time|step"
            r"|tasks?|numbers?|code|charts?|tables?|reports?|documents?|files?|commits?|bookings?|orders?)\b"
        ),
    ),
    (
        1.5,
        "whenever anytime any every each you",
        (
            r"\b(?:whenever|anytime|any time|every time|each time)\b|\b(?:when|before|after|if|while|once|unless"
            r"|until) you\b"
        ),
    ),
    (
        1.0,
        "your you",
        (
            r"\b(?:your|you) (?:\w+ )?(?:reply|replies|response|responses|answers?|messages?|outputs?|sentences?|tone"
            r"|words?)\b"
        ),
    ),
    (
        0.9,
        "instead rather not longer more most least less fewer exactly strictly",
        (
            r"\b(?:instead of|rather than|not (?:as|in|the|a|any)\b|no longer|no more than|at most|at least|or"
            r" less|or fewer"
            r"|exactly|strictly)\b"
        ),
    ),
    (
        1.0,
        "only else exclusively solely just",
        r"\b(?:only|nothing else|nobody else|exclusively|solely)\b|\bjust (?:do|go|give|use|tell|the)\b",
    ),
    (
        1.5,
        "without need needs require requires",
        (
            r"\b(?:without|needs?|requires?) (?:\w+ ){0,4}(?:approv\w+|permission|confirm\w*|ask\w*|go-ahead"
            r"|consent|check\w*"
            r"|operator|review|saying|sign-off)\b"
        ),
    ),
    (
        1.3,
        "behalf go my check ask run wait let",
        (
            r"\b(?:on my behalf|my go-ahead|my approval|check with me|ask me|run it by me|wait for (?:me|my)"
            r"|let me (?:approve|review|see|send))\b"
        ),
    ),
    (
        1.2,
        "stop quit cease no not",
        r"\b(?:stop|quit|cease) \w+ing\b|^(?:and )?no \w+|[,;:] (?:and )?no \w+|[,;] not \w+",
    ),
    (
        1.2,
        "should stay stays keep keeping capped ceiling cap deadline remain remains",
        (
            r"\b(?:should (?:be|stay|remain|have|use|come|end|start|never|always)|(?:stay|remain)s? (?:out|free"
            r"|within|under|below"
            r"|private|away)|keep(?:ing)? (?:\w+ ){1,4}(?:out|away|private|secret|short|brief|simple|under|below"
            r"|within|to)"
            r"|capped|ceiling|cap is|deadline)\b"
        ),
    ),
    (
        1.6,
        "important essential crucial vital",
        r"\b(?:important|essential|crucial|vital) (?:to me |for me )?(?:that|to)\b",
    ),
    (2.0, "important do_not_evict", r"\bDO_NOT_EVICT\b|\bIMPORTANT\b"),
    (
        1.6,
        "please kindly you",
        r"\b(?:please|kindly) (?:don['\u2019]?t|do not|not|never|no)\b|\byou (?:please )?(?:not|never|always)\b",
    ),
    (2.0, "nothing nobody no none", r"\b(?:nothing|nobody|no one|none)\b.{0,60}\b(?:without|unless|until|except)\b"),
    (2.0, "word", r"\bnot (?:a|one) (?:single )?word (?:to|about|of)\b|\bword of (?:caution|warning)\b"),
    (1.6, "without", r"\bwithout my (?:ok(?:ay)?|permission|consent|approval|say-so|knowledge)\b"),
    (
        2.0,
        "approve see review check confirm know sign",
        r"\bi (?:\w+ )?(?:want|need|like|expect) to (?:approve|see|review|check|confirm|know|sign off)\b",
    ),
    (2.0, "like want need take", r"\bi (?:\w+ )?(?:like|want|need|take) (?:my|all|every|each|things|it)\b"),
    (
        1.6,
        "out untouchable hands touch taboo aside",
        (
            r"\b(?:leave|keep|take|cut) .{1,40}\bout\b|\bleave .{1,30}\baside\b|\b(?:is|are) (?:all )?out\b"
            r"|\b(?:untouchable|hands off|out of bounds|do not touch|taboo)\b"
        ),
    ),
    (
        2.0,
        "",
        r"\b(?:allerg\w+|intoleran\w+|vegan|vegetarian|colou?r-?blind|diabetic|kosher|halal)\b",
    ),
    (
        1.5,
        "when whenever while for",
        r"^(?:when(?:ever)?|while|for) (?:\w+ ){0,3}\w+ing\b|\bwhen \w+ing\b|\bwhenever\b",
    ),
    (
        1.3,
        "prior before even",
        r"\b(?:prior to|before) (?:\w+ )?(?:\w+ing|you|any|the answer)\b|\beven (?:when|if|for|though)\b",
    ),
    (
        1.0,
        "first please thanks thank for",
        r"(?:^| )(?:first|please|thanks|for me|thank you)(?:, (?:please|thanks|thank you))?[.!]?$",
    ),
    (
        1.0,
        "all for not no over",
        r"^all \w+|^\w+ (?:\w+ )?for me\b|^\w+(?: \w+)?, (?:not|no) \w+|\b\w+ over \w+(?: \w+)? when\b",
    ),
    (
        0.8,
        "",
        (
            r"\b(?:metric|imperial|celsius|fahrenheit|bullets?(?: points?)?|emojis?|markdown|numerals?|digits?|formal"
            r"|informal)\b"
        ),
    ),
    (
        0.8,
        "",
        r"\b(?:confidential|secret|private|sensitive|personal (?:data|info\w*)|disclos\w+|reveal\w*|password)\b",
    ),
)
"""Signs of a standing rule: what each adds to the grade, words of which one is always in it ("": none is), and it."""
_WATCHED: dict[str, tuple[int, ...]] = {
    word: tuple(i for i, (_, words, _) in enumerate(_SIGNS) if word in words.split())
    for word in {w for _, words, _ in _SIGNS for w in words.split()}
}
_UNWATCHED = tuple(i for i, (_, words, _) in enumerate(_SIGNS) if not words)
_ASCII_WORD = re.compile(r"[a-z_]+")


@cache
def _sign(number: int) -> re.Pattern[str]:
    """The pattern of a sign, made when it is first looked for: most are rare."""
    pattern = _SIGNS[number][2]
    return re.compile(pattern, 0 if "IMPORTANT" in pattern else re.IGNORECASE)


def signs(text: str) -> float:
    """The weights of all signs of a rule in ``text``."""
    likely = set(_UNWATCHED)
    for word in set(_ASCII_WORD.findall(text.lower())):
        likely.update(_WATCHED.get(word, ()))
    return sum(_SIGNS[i][0] for i in sorted(likely) if _sign(i).search(text))
