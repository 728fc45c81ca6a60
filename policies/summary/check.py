"""Whether a model's reply can be used as a summary: it says something, declines nothing, repeats
nothing, is smaller.

A reply is refused with a short code, which names its reason when it is requested once more. What it
names that its material lacks is looked at next (:mod:`policies.summary.identifiers`). Every pattern
is bounded, and of a reply only as much is read as an answer of the requested length can have.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from policies.effects import Failed, Summary
from policies.summary.material import harmless
from policies.summary.prompts import HEADINGS, Prompt, field_named
from policies.text.segments import sentences
from policies.tokens import TokenCounter

SMALLER = 0.9
TOO_LONG = 1.5
MAX_TOKEN_LEN = 32
"""Characters; a text of more characters than this times its allowance is too long without being
counted.
"""
DEFLATES = 10
"""A text that deflates to a tenth says the same over and over; of 900 real answers none was below a
fifth.
"""
MAX_REPEATED = 4
"""How often a sentence may occur; a text is refused if most of its sentences exceed that."""
MOST_UNREADABLE = 0.02
MAX_WORD_LEN = 400
BRIEF_LEN = 480
"""Characters up to which a reply that begins like an error is one."""
MAX_ITEMS = 60
MAX_ITEM_LEN = 1_200
MOST_OF_TEXT = 0.6

_I = r"i(?:['\u2019]m| am)"
_CAN = (
    r"(?:help|assist|do|provide|comply|summari[sz]e|continue|fulfil|create|process|access|share|discuss|support|engage"
    r"|complete|generate|see|read|give|write|produce|carry)"
)
_REFUSAL = re.compile(
    rf"\W{{0,3}}(?:{_I} (?:very |really |so )?(?:sorry|afraid)|sorry, |(?:unfortunately,? )?i (?:can(?:no|['\u2019])t"
    rf"|won['\u2019]t|could ?n[o'\u2019]t) {_CAN}"
    rf"|(?:unfortunately,? )?{_I} (?:unable|not able|not allowed|not comfortable)"
    r"|as an? (?:ai|large|language)\b|i (?:must|have to) (?:decline|refuse)"
    r"|this (?:request|content) (?:violates|was flagged)"
    r"|es tut mir leid|lo siento|je suis d[\u00e9e]sol[\u00e9e]|mi dispiace|desculpe|\u62b1\u6b49|\u5bf9\u4e0d\u8d77"
    r"|\u7533\u3057\u8a33|\u043a \u0441\u043e\u0436\u0430\u043b\u0435\u043d\u0438\u044e"
    r"|\u0438\u0437\u0432\u0438\u043d\u0438\u0442\u0435|\uc8c4\uc1a1)",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"\W{0,4}(?:error\b|(?:http|status)?(?: code)?[ :]{0,3}[45]\d\d\b|(?:internal server|api|upstream|gateway) error"
    r"|rate ?limit|too many requests|service unavailable|bad gateway|(?:request )?timed out"
    r"|this model['\u2019]s maximum)",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"(?:(?:sure|certainly|of course|okay|ok|absolutely|here (?:is|are)|here['\u2019]s|below (?:is|are)"
    r"|the following)\b)[^\n]{0,160}:[ \t*]{0,6}\n",
    re.IGNORECASE,
)
_THOUGHT = re.compile(
    r"<(/?)(?:think|thinking|reasoning|analysis|scratchpad|reflection)>", re.IGNORECASE
)
_UNREADABLE = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ud800-\udfff]")
_NOTHING = re.compile(
    r"[\s\W_]{0,20}(?:none|nothing|null|n/?a|tbd|unknown|no notes?"
    r"|not (?:mentioned|stated|applicable|specified|provided)|to be filled)?[\s\W_]{0,20}\Z",
    re.IGNORECASE,
)
_TITLES = re.compile(
    r"(?im)^[ \t#>*_-]{0,8}(?:"
    + "|".join(map(re.escape, HEADINGS.values()))
    + r"|done so far|decisions and why)\b[ \t*_]{0,4}(?:\([^()\n]{0,80}\))?[ \t*_]{0,4}(?::|$)"
)
_NUMBERING = "-*\u2022+#>0123456789.) \t"
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f](?=\s|\Z)|\n")
_HEADING = re.compile(
    r"[\s#>*_\d.)-]{0,12}([A-Za-z][A-Za-z -]{1,40}?)[\s*_]{0,6}(?:\([^()\n]{0,80}\))?[\s*_]{0,4}([:\uff1a]"
    r"|\Z)[\s*_]{0,6}"
)
_BULLET = re.compile(r"\s{0,40}(?:[-*\u2022\u2013+]|\d{1,3}[.)]|\[[ xX]\])\s{1,8}")
_FENCE = re.compile(r"```[a-zA-Z0-9_-]{0,20}[ \t]{0,20}\n")


def judge(
    reply: object,
    *,
    material: str,
    prompt: Prompt,
    max_tokens: int,
    counter: TokenCounter,
    original: int | None = None,
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
    if len(reply.text) > (max_tokens * TOO_LONG + prompt.shortest) * MAX_TOKEN_LEN * 4:
        return "", "too_long"
    text = _unwrapped(harmless(without_reasoning(reply.text)))
    if reply.finish_reason == "length" and not text.startswith("{"):
        text = _whole(text)
    written = "" if text.startswith("{") else text
    if prompt.schema:
        text = under_headings(text)
    if prompt.name == "notes" and text and _NOTHING.match(text):
        return "", "nothing"
    size = counter.count(material) if original is None else original
    failure = _fault(text, size, shortest=prompt.shortest, max_tokens=max_tokens, counter=counter)
    if declines(text, material=material):
        failure = "refusal"
    if not failure and _loops(written):
        failure = "loop"
    return ("", failure) if failure else (text, "")


def declines(text: str, *, material: str = "") -> bool:
    """Whether a reply is a refusal, or the short text of an error that its material does not
    mention.
    """
    text = without_reasoning(text)
    error = _ERROR.match(text) if len(text) <= BRIEF_LEN else None
    is_error = error is not None and error.group().strip(' "{[').lower() not in material.lower()
    return is_error or _REFUSAL.match(text) is not None


def without_reasoning(text: str) -> str:
    """``text`` without what is inside thinking tags; all before an end tag without a start tag is
    thinking too.
    """
    kept: list[str] = []
    depth = 0
    at = 0
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


def _fault(text: str, size: int, *, shortest: int, max_tokens: int, counter: TokenCounter) -> str:
    lines = (line.strip() for line in _TITLES.sub("", text).splitlines())
    told = "\n".join(line for line in lines if not _NOTHING.match(line))
    tokens = counter.count(text)
    if not told:
        return "empty"
    if _is_garbage(text):
        return "garbage"
    if min(tokens, counter.count(told)) < shortest:
        return "too_short"
    if _loops(text):
        return "loop"
    if tokens > max_tokens * TOO_LONG:
        return "too_long"
    return "not_smaller" if tokens >= size * SMALLER else ""


def _is_garbage(text: str) -> bool:
    if len(_UNREADABLE.findall(text)) > len(text) * MOST_UNREADABLE:
        return True
    endless = sum(len(word) for word in text.split() if len(word) > MAX_WORD_LEN and word.isascii())
    return endless * 2 > len(text)


def _unwrapped(text: str) -> str:
    preamble = _PREAMBLE.match(text)
    if preamble:
        text = text[preamble.end() :]
    text = text.strip()
    fenced = _FENCE.match(text)
    if fenced and text.endswith("```") and text.count("```") == 2:
        return text[fenced.end() : -3].strip()
    return text


def _whole(text: str) -> str:
    """``text`` up to the end of its last whole sentence, where that is most of it."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends and ends[-1] * 2 > len(text) else text


def _loops(text: str) -> bool:
    """Whether a text repeats itself; a list of lines that differ in a number does not."""
    said = [s.lstrip(_NUMBERING) for line in text.splitlines() for s in sentences(line)]
    times = Counter(s for s in said if s)
    if 2 * sum(n for n in times.values() if n > MAX_REPEATED) > times.total():
        return True
    raw = text.encode(errors="replace")
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(deflate.compress(raw) + deflate.flush()) * DEFLATES <= len(raw)


def under_headings(text: str) -> str:
    """JSON by the schema, or prose with headings, as the headings and their items.

    Prose comes back as it is where they are less than most of it, and JSON that cannot be read as
    an empty text.
    """
    if text.startswith("{"):
        return _shown(_from_json(text))
    shown = _shown(_from_headings(text))
    return shown if _weight(shown) >= _weight(text) * MOST_OF_TEXT else text


def _weight(text: str) -> int:
    return sum(len(word) for word in set(text.split()))


def _shown(found: Mapping[str, Sequence[str]]) -> str:
    parts: list[str] = []
    for field, heading in HEADINGS.items():
        lines = map(_tidy, found.get(field, ()))
        items = list(dict.fromkeys(line for line in lines if not _NOTHING.match(line)))[:MAX_ITEMS]
        if len(items) == 1:
            parts.append(f"{heading}: {items[0]}")
        elif items:
            parts.append("\n".join((f"{heading}:", *(f"- {item}" for item in items))))
    return "\n".join(parts)


def _tidy(item: str) -> str:
    line = " ".join(item[: MAX_ITEM_LEN * 2].split())
    for _ in range(4):
        bullet = _BULLET.match(line + " ")
        if bullet is None:
            break
        line = line[bullet.end() :].strip()
    return line[:MAX_ITEM_LEN].rstrip()


def _from_json(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return found
    for key, value in raw.items():
        items = value if isinstance(value, list) else [value]
        said = (_decision(each) if isinstance(each, Mapping) else each for each in items)
        found.setdefault(field_named(key.replace("_", " ")), []).extend(
            each for each in said if isinstance(each, str)
        )
    return found


def _decision(given: Mapping[str, object]) -> str:
    """One decision in a line: what, why, and what was rejected."""
    what, why, rejected = (given.get(name) for name in ("decision", "why", "rejected"))
    others = "; ".join(map(str, rejected)) if isinstance(rejected, list) else ""
    text = str(what or "")
    if why:
        text += f" (because {why})"
    return f"{text} [not: {others}]" if others else text


def _from_headings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    field = ""
    are_listed = True
    for line in text.splitlines():
        head = _HEADING.match(line[:200])
        named = field_named(head.group(1)) if head else ""
        is_title = head is not None and (head.group(2) or line.lstrip()[:1] in {"#", "*"})
        is_listed = _BULLET.match(line) is not None
        if head is not None and named and is_title and (are_listed or not is_listed):
            field = named
            are_listed = are_listed and is_listed
            line = line[head.end() :]
        if field and line.strip():
            found.setdefault(field, []).append(line)
    return found
