"""Whether a reply can be used as a summary, and if not, why: one code for each way in which replies are useless.

Every pattern is bounded, and of a reply only as much is read as an answer of the asked length can have.
"""

import re
import zlib
from collections import Counter

from policies.effects import Failed, Summary
from policies.summaries.prompts import Prompt
from policies.summaries.proposal import HEADINGS, under_headings
from policies.summary import harmless
from policies.text.segments import sentences
from policies.tokens import TokenCounter

SMALLER = 0.9
TOO_LONG = 1.5
LONGEST_TOKEN = 32
"""Characters; a text of more characters than this times its allowance is too long without being counted."""
ECHO_RUN = 200
DEFLATES = 10
"""A text that deflates to a tenth says the same over and over; of 900 real answers none came below a fifth."""
MOST_REPEATED = 4
"""Times that a sentence may stand; a text is refused of which such ones are most."""
UNREADABLE = 0.02
LONGEST_WORD = 400
BRIEF = 120
"""Tokens up to which a reply that opens like a provider's error is one."""
REPAIRABLE = frozenset(
    {"too_short", "empty", "not_smaller", "echo", "too_long", "loop", "garbage", "invented", "missing"}
)

_I = r"i(?:['\u2019]m| am)"
_CAN = (
    r"(?:help|assist|do|provide|comply|summari[sz]e|continue|fulfil|create|process|access|share|discuss|support|engage"
    r"|complete|generate|see|read|give|write|produce|carry)"
)
_REFUSAL = re.compile(
    rf"\W{{0,3}}(?:{_I} (?:very |really |so )?(?:sorry|afraid)|sorry, |(?:unfortunately,? )?i (?:can(?:no|['\u2019])t"
    rf"|won['\u2019]t"
    rf"|could ?n[o'\u2019]t) {_CAN}|(?:unfortunately,? )?{_I} (?:unable|not able|not allowed|not comfortable)"
    r"|as an? (?:ai|large|language)\b|i (?:must|have to) (?:decline|refuse)|this (?:request|content) (?:violates"
    r"|was flagged)"
    r"|es tut mir leid|lo siento|je suis d[\u00e9e]sol[\u00e9e]|mi dispiace|desculpe|\u62b1\u6b49|\u5bf9\u4e0d\u8d77"
    r"|\u7533\u3057\u8a33|\u043a \u0441\u043e\u0436\u0430\u043b\u0435\u043d\u0438\u044e"
    r"|\u0438\u0437\u0432\u0438\u043d\u0438\u0442\u0435"
    r"|\uc8c4\uc1a1)",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"\W{0,4}(?:\"?error\"?\s{0,2}[:=]|error (?:code|\d{3})|(?:http|status)(?: status)?(?: code)?[ :]{1,3}[45]\d\d\b"
    r"|[45]\d\d "
    r"(?:bad|internal|too many|service|gateway|unauthori[sz]ed|forbidden|not found)|(?:internal server|api"
    r"|rate ?limit|upstream"
    r"|connection|authentication|gateway|provider|model|generation|summary|summari[sz]ation"
    r"|compaction)(?: \w{1,12}){0,2}"
    r" (?:error|exceeded|reached|timed out|timeout|failed|unavailable|overloaded)\b|request timed out"
    r"|too many requests|service"
    r" unavailable|bad gateway|context[ _]length[ _]exceeded|this model['\u2019]s maximum context"
    r"|the model is (?:currently )?overloaded"
    r"|invalid api key|insufficient_quota|you exceeded your|traceback \(most recent|something went wrong"
    r"|failed to (?:generate"
    r"|summari[sz]e|create|produce) )",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"\W{0,4}(?:(?:your |the |insert |conversation |brief ){0,3}summary (?:goes )?(?:here|unavailable|not available"
    r"|is not"
    r" available|placeholder)|insert (?:your |the |a )?(?:summary|text)|no summary|placeholder|lorem ipsum"
    r"|todo\b.{0,20}summar"
    r"|no response|no content|no output|undefined|null|nan)\W{0,6}(?:\Z|\n|available|generated|was |could |returned)",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"(?:(?:sure|certainly|of course|okay|ok|absolutely|here (?:is|are)|here['\u2019]s|below (?:is|are)"
    r"|the following)\b)"
    r"[^\n]{0,160}:[ \t*]{0,6}\n",
    re.IGNORECASE,
)
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|reasoning|analysis|scratchpad|reflection)>", re.IGNORECASE)
_FENCED = re.compile(r"```[a-zA-Z0-9_-]{0,20}[ \t]{0,20}\n")
_UNREADABLE = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ud800-\udfff]")
_EMPTY_VALUE = re.compile(
    r"[\s\W_]{0,20}(?:none|nothing|n/?a|tbd|unknown|not (?:mentioned|stated|applicable|specified|provided)"
    r"|to be filled)?[\s\W_]{0,20}\Z",
    re.IGNORECASE,
)
_NONE = re.compile(r"\W{0,3}(?:none|nothing|no notes?)\W{0,3}\Z", re.IGNORECASE)
_TITLES = re.compile(
    r"(?im)^[ \t#>*_-]{0,8}(?:"
    + "|".join(map(re.escape, HEADINGS.values()))
    + r"|done so far|decisions and why)\b[ \t*_]{0,4}(?:\([^()\n]{0,80}\))?[ \t*_]{0,4}(?::|$)"
)
_NUMBERING = "-*\u2022+#>0123456789.) \t"
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f](?=\s|\Z)|\n")


def judge(
    reply: object, *, material: str, prompt: Prompt, max_tokens: int, counter: TokenCounter, original: int | None = None
) -> tuple[str, str]:
    """The usable text of a reply and "", or "" and the code of why it is refused.

    ``original`` is how many tokens the summary replaces where that is not the material's number.
    """
    if isinstance(reply, Failed):
        return "", reply.reason or "failed"
    if not isinstance(reply, Summary):
        return "", "no_reply"
    if reply.tool_calls:
        return "", "tool_call"
    if len(reply.text) > (max_tokens * TOO_LONG + prompt.shortest) * LONGEST_TOKEN * 4:
        return "", "too_long"
    said = without_reasoning(reply.text)
    if not said:
        return "", "reasoning_only" if reply.text.strip() else "empty"
    if _is_garbage(said):
        return "", "garbage"
    text = _unwrapped(harmless(said)).strip()
    if reply.finish_reason == "length" and not text.startswith("{"):
        text = _whole(text)
    written = "" if text.startswith("{") else text
    if prompt.schema:
        text = under_headings(text)
    if prompt.name == "notes" and _NONE.match(text):
        return "", "nothing"
    if _echoes(said, material):
        return "", "echo"
    tokens = counter.count(text)
    size = counter.count(material) if original is None else original
    text, failure = _judge_text(
        text, tokens, size, material=material, prompt=prompt, max_tokens=max_tokens, counter=counter
    )
    return ("", "loop") if text and _loops(written) else (text, failure)


def declines(text: str) -> bool:
    """Whether a reply opens as one that declines, or as the error of a provider: asking again may bring another."""
    said = without_reasoning(text)
    return bool(_REFUSAL.match(said) or _PLACEHOLDER.match(said) or (_ERROR.match(said) and len(said) < BRIEF * 4))


def without_reasoning(text: str) -> str:
    """``text`` without what stands in thinking tags; all before an end that has no beginning is thinking too."""
    kept: list[str] = []
    depth, at = 0, 0
    for tag in _THOUGHT.finditer(text):
        if tag.group(1):
            if depth == 0:
                kept.clear()
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                kept.append(text[at : tag.start()])
            depth += 1
        at = tag.end()
    if depth == 0:
        kept.append(text[at:])
    return "".join(kept).strip()


def _judge_text(
    text: str, tokens: int, size: int, *, material: str, prompt: Prompt, max_tokens: int, counter: TokenCounter
) -> tuple[str, str]:
    told = _substance(text)
    if not told:
        return "", "empty"
    if _REFUSAL.match(text):
        return "", "refusal"
    if _is_error(text, tokens, material=material):
        return "", "error_text"
    if min(tokens, counter.count(told)) < prompt.shortest:
        return "", "too_short"
    if _loops(text):
        return "", "loop"
    if tokens > max_tokens * TOO_LONG:
        return "", "too_long"
    if tokens >= size * SMALLER:
        return "", "not_smaller"
    return text, ""


def _unwrapped(text: str) -> str:
    """``text`` without a preamble and without a code fence around the whole of it."""
    preamble = _PREAMBLE.match(text)
    if preamble:
        text = text[preamble.end() :]
    stripped = text.strip()
    fenced = _FENCED.match(stripped)
    if fenced and stripped.endswith("```") and stripped.count("```") == 2:
        return stripped[fenced.end() : -3]
    return text


def _whole(text: str) -> str:
    """``text`` up to its last complete sentence or line, as it was cut off; all of it where that is little."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends and ends[-1] * 2 > len(text) else text


def _substance(text: str) -> str:
    """What is said under the headings, without them and without words for nothing."""
    lines = (line.strip() for line in _TITLES.sub("", text).splitlines())
    return "\n".join(line for line in lines if not _EMPTY_VALUE.match(line))


def _is_garbage(text: str) -> bool:
    """Whether a text is not readable: replaced or control characters, or one endless word."""
    if len(_UNREADABLE.findall(text)) > len(text) * UNREADABLE:
        return True
    endless = sum(len(w) for w in text.split() if len(w) > LONGEST_WORD and w.isascii() and w[:1] not in "{[")
    return endless * 2 > len(text)


def _is_error(text: str, tokens: int, *, material: str) -> bool:
    """Whether a reply is an error of whoever made it, or stands for a summary; not if the material says it too."""
    if _PLACEHOLDER.match(text):
        return True
    found = _ERROR.match(text)
    return found is not None and tokens <= BRIEF and found.group().strip(' "{[').lower() not in material.lower()


def _echoes(text: str, material: str) -> bool:
    """Whether most of a reply is copied out of its input in long runs."""
    if len(text) < ECHO_RUN * 2:
        return False
    pieces = [text[i : i + ECHO_RUN] for i in range(0, len(text) - ECHO_RUN + 1, ECHO_RUN)]
    copied = sum(piece in material for piece in pieces)
    return copied * 2 > len(pieces)


def _loops(text: str) -> bool:
    """Whether a text repeats itself; a list of lines that differ in a number does not."""
    said = [s.lstrip(_NUMBERING) for line in text.splitlines() for s in sentences(line)]
    times = Counter(s for s in said if s)
    if 2 * sum(n for n in times.values() if n > MOST_REPEATED) > times.total():
        return True
    raw = text.encode(errors="replace")
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(deflate.compress(raw) + deflate.flush()) * DEFLATES <= len(raw)
