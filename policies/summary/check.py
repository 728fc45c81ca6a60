"""Whether a reply can be used as a summary, and what it says of the task's state.

A reply is refused with one code for each way in which replies are useless. Every pattern is bounded, and of a reply
only as much is read as an answer of the asked length can have.

The state is read from JSON or from text under headings, whatever the model gave. Small models break JSON: a fence
around it, comments, a comma too many, no end. As much as can be read is read.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.effects import Failed, Summary
from policies.ledger import TaskDecision
from policies.summary.material import harmless
from policies.summary.prompts import HEADINGS, Prompt, field_named
from policies.text.segments import sentences
from policies.tokens import TokenCounter

SMALLER = 0.9
TOO_LONG = 1.5
MAX_TOKEN_LEN = 32
"""Characters; a text of more characters than this times its allowance is too long without being counted."""
ECHO_RUN = 200
DEFLATES = 10
"""A text that deflates to a tenth says the same over and over; of 900 real answers none came below a fifth."""
MAX_REPEATED = 4
"""Times that a sentence may stand; a text is refused of which such ones are most."""
UNREADABLE = 0.02
MAX_WORD_LEN = 400
BRIEF = 120
"""Tokens up to which a reply that opens like a provider's error is one."""

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
MAX_ITEMS = 60
MAX_ITEM_LEN = 1_200
MAX_READ_LEN = 400_000
MAX_PREAMBLE_LEN = 200
ATTEMPTS = 12
MAX_OF_TEXT = 0.6
_HEADING = re.compile(
    r"[\s#>*_\d.)-]{0,12}([A-Za-z][A-Za-z -]{1,40}?)[\s*_]{0,6}(?:\([^()\n]{0,80}\))?[\s*_]{0,4}([:\uff1a]"
    r"|\Z)[\s*_]{0,6}"
)
_BULLET = re.compile(r"\s{0,40}(?:[-*\u2022\u2013+]|\d{1,3}[.)]|\[[ xX]\])\s{1,8}")
_NOTHING = re.compile(
    r"[\W_]*+(?:(?:none|nothing|n/?a|unknown|not (?:mentioned|stated|applicable|specified)|null)[\W_]*+)?\Z",
    re.IGNORECASE,
)
_WHY = re.compile(r" \((?:because|why:|since) ([^\n]{1,900})\)\Z")
_NOT = re.compile(r" \[(?:not|rejected): ([^\]\n]{1,600})\]\Z")
_FENCE = re.compile(r"```[a-zA-Z0-9_-]{0,20}[ \t]{0,20}\n")
_COMMENT = re.compile(r"//[^\n]*|/\*[\s\S]*?(?:\*/|\Z)")


def judge(
    reply: object, *, material: str, prompt: Prompt, max_tokens: int, counter: TokenCounter, original: int | None = None
) -> tuple[str, str]:
    """The usable text of a reply and "", or "" and the code of why it is refused.

    ``original`` is how many tokens the summary replaces where that is not the material's number.
    """
    said, failure = _said(reply, (max_tokens * TOO_LONG + prompt.shortest) * MAX_TOKEN_LEN * 4)
    if failure:
        return "", failure
    assert isinstance(reply, Summary)  # noqa: S101 - what says something is one
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
    size = counter.count(material) if original is None else original
    failure = _fault(text, size, material=material, shortest=prompt.shortest, max_tokens=max_tokens, counter=counter)
    failure = failure or ("loop" if _loops(written) else "")
    return ("", failure) if failure else (text, "")


def declines(text: str) -> bool:
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


def _said(reply: object, most: float) -> tuple[str, str]:
    if isinstance(reply, Failed):
        return "", reply.reason or "failed"
    if not isinstance(reply, Summary):
        return "", "no_reply"
    if reply.tool_calls:
        return "", "tool_call"
    if len(reply.text) > most:
        return "", "too_long"
    said = without_reasoning(reply.text)
    if not said:
        return "", "reasoning_only" if reply.text.strip() else "empty"
    return said, "garbage" if _is_garbage(said) else ""


def _fault(text: str, size: int, *, material: str, shortest: int, max_tokens: int, counter: TokenCounter) -> str:
    told, tokens = _substance(text), counter.count(text)
    if not told:
        return "empty"
    if _REFUSAL.match(text):
        return "refusal"
    if _is_error(text, tokens, material=material):
        return "error_text"
    if min(tokens, counter.count(told)) < shortest:
        return "too_short"
    if _loops(text):
        return "loop"
    if tokens > max_tokens * TOO_LONG:
        return "too_long"
    return "not_smaller" if tokens >= size * SMALLER else ""


def _unwrapped(text: str) -> str:
    preamble = _PREAMBLE.match(text)
    if preamble:
        text = text[preamble.end() :]
    stripped = text.strip()
    fenced = _FENCE.match(stripped)
    if fenced and stripped.endswith("```") and stripped.count("```") == 2:
        return stripped[fenced.end() : -3]
    return text


def _whole(text: str) -> str:
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends and ends[-1] * 2 > len(text) else text


def _substance(text: str) -> str:
    lines = (line.strip() for line in _TITLES.sub("", text).splitlines())
    return "\n".join(line for line in lines if not _EMPTY_VALUE.match(line))


def _is_garbage(text: str) -> bool:
    if len(_UNREADABLE.findall(text)) > len(text) * UNREADABLE:
        return True
    endless = sum(len(w) for w in text.split() if len(w) > MAX_WORD_LEN and w.isascii() and w[:1] not in "{[")
    return endless * 2 > len(text)


def _is_error(text: str, tokens: int, *, material: str) -> bool:
    """Whether a reply is an error of whoever made it, or stands for a summary; not if the material says it too."""
    if _PLACEHOLDER.match(text):
        return True
    found = _ERROR.match(text)
    return found is not None and tokens <= BRIEF and found.group().strip(' "{[').lower() not in material.lower()


def _echoes(text: str, material: str) -> bool:
    if len(text) < ECHO_RUN * 2:
        return False
    pieces = [text[i : i + ECHO_RUN] for i in range(0, len(text) - ECHO_RUN + 1, ECHO_RUN)]
    copied = sum(piece in material for piece in pieces)
    return copied * 2 > len(pieces)


def _loops(text: str) -> bool:
    """Whether a text repeats itself; a list of lines that differ in a number does not."""
    said = [s.lstrip(_NUMBERING) for line in text.splitlines() for s in sentences(line)]
    times = Counter(s for s in said if s)
    if 2 * sum(n for n in times.values() if n > MAX_REPEATED) > times.total():
        return True
    raw = text.encode(errors="replace")
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return len(deflate.compress(raw) + deflate.flush()) * DEFLATES <= len(raw)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a model says of a task, one line each: a proposal, because code decides what of it is believed."""

    goal: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()
    decisions: tuple[TaskDecision, ...] = ()
    open_issues: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    learnings: tuple[str, ...] = ()
    next_step: tuple[str, ...] = ()

    def to_text(self) -> str:
        parts: list[str] = []
        for field, heading in HEADINGS.items():
            items = getattr(self, field)
            if len(items) == 1:
                parts.append(f"{heading}: {items[0]}")
            elif items:
                parts.append("\n".join((f"{heading}:", *(f"- {item}" for item in items))))
        return "\n".join(parts)

    @classmethod
    def from_json(cls, text: str) -> "Proposal | None":
        raw = _parse(text)
        return None if raw is None else _from_object(raw)


def under_headings(text: str) -> str:
    """``text`` as the headings and items that it holds; as it is where they are less than most of it."""
    if (found := _from_json_in(text[:MAX_READ_LEN])) is not None:
        return found.to_text()
    found = _from_headings(text[:MAX_READ_LEN])
    shown = "" if found is None else found.to_text()
    return shown if found is not None and _weight(shown) >= _weight(text) * MAX_OF_TEXT else text


def _from_json_in(text: str) -> Proposal | None:
    start = text.find("{")
    if not 0 <= start <= MAX_PREAMBLE_LEN or _from_headings(text[:start]) is not None:
        return None
    return Proposal.from_json(text[start:])


def _weight(text: str) -> int:
    return sum(len(word) for word in set(text.split()))


def _parse(text: str) -> Mapping[str, object] | None:
    text = _FENCE.sub("", text[:MAX_READ_LEN], count=1).strip()
    if not text.startswith("{"):
        return None
    for candidate in _mended(text):
        try:
            raw = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return raw if isinstance(raw, dict) else None
    return None


def _mended(text: str) -> Iterator[str]:
    """``text`` without comments and commas too many, closed where it ends early; then shorter, item by item."""
    out: list[str] = []
    stack: list[str] = []
    ends: list[tuple[int, str]] = []
    in_string, at = False, 0
    while at < len(text):
        c = text[at]
        if in_string:
            step = 2 if c == "\\" else 1
            out.append(text[at : at + step] if c != "\n" else "\\n")
            in_string = c != '"'
            at += step
            continue
        comment = _COMMENT.match(text, at) if c == "/" else None
        if comment is not None:
            at = comment.end()
            continue
        if c in "}]":
            while out and out[-1].isspace():
                out.pop()
            if out and out[-1] == ",":
                out.pop()
            if stack:
                stack.pop()
        elif c == ",":
            ends.append((len(out), "".join(reversed(stack))))
        elif c in "{[":
            stack.append("}" if c == "{" else "]")
        in_string = c == '"'
        out.append(c)
        at += 1
        if c in "}]" and not stack:
            break
    whole = "".join(out)
    if in_string:
        whole = whole.removesuffix("\\") + '"'
    closing = "".join(reversed(stack))
    yield whole.rstrip(" \n\t,") + closing
    for length, closers in reversed(ends[-ATTEMPTS:]):
        yield "".join(out[:length]) + closers


def _from_object(raw: Mapping[str, object]) -> Proposal | None:
    found: dict[str, list[object]] = {}
    known = False
    for key, value in raw.items():
        if not (field := field_named(key[:60].replace("_", " "))):
            continue
        known = True
        found.setdefault(field, []).extend(value if isinstance(value, list) else [value])
    return _proposal({f: [_item(v, f) for v in values] for f, values in found.items()}) if known else None


def _item(value: object, field: str) -> str | TaskDecision:
    if isinstance(value, Mapping):
        if field == "decisions":
            return _decision(value)
        return ", ".join(f"{v}" for v in value.values() if isinstance(v, str | int | float) and str(v).strip())
    if isinstance(value, list):
        return ", ".join(str(v) for v in value if isinstance(v, str | int | float))
    return "" if value is None or isinstance(value, bool) else str(value)


def _decision(value: Mapping[str, object]) -> TaskDecision:
    def first(*names: str) -> str:
        return next((str(value[n]) for n in names if isinstance(value.get(n), str | int | float)), "")

    against = next((value[n] for n in ("rejected", "alternatives", "not") if value.get(n)), ())
    others = against if isinstance(against, list) else [against] if isinstance(against, str) else []
    return TaskDecision(
        first("decision", "text", "what", "choice"),
        first("why", "rationale", "reason"),
        tuple(v for v in map(str, others) if v.strip()),
    )


def _from_headings(text: str) -> Proposal | None:
    found: dict[str, list[str | TaskDecision]] = {}
    field, listed = "", True
    for line in text.splitlines():
        head = _HEADING.match(line[:200])
        named = field_named(head.group(1)) if head else ""
        is_title = head is not None and (head.group(2) or line.lstrip()[:1] in {"#", "*"})
        if head is not None and named and is_title and (listed or not _BULLET.match(line)):
            field, listed, line = named, listed and _BULLET.match(line) is not None, line[head.end() :]
            found.setdefault(field, [])
        if field and line.strip():
            found[field].append(line)
    return _proposal(found) if found else None


def _proposal(found: Mapping[str, Sequence[str | TaskDecision]]) -> Proposal:
    decisions = [_tidy_decision(v) for v in found.get("decisions", ())]
    plain = {f: _tidied(found.get(f, ())) for f in HEADINGS if f != "decisions"}
    unique = dict.fromkeys(d for d in decisions if not _NOTHING.match(d.text))
    return Proposal(decisions=tuple(unique)[:MAX_ITEMS], **plain)


def _tidied(items: Sequence[str | TaskDecision]) -> tuple[str, ...]:
    lines = (_tidy(v) for v in items if isinstance(v, str))
    return tuple(dict.fromkeys(v for v in lines if not _NOTHING.match(v)))[:MAX_ITEMS]


def _tidy(item: str) -> str:
    line = " ".join(item[: MAX_ITEM_LEN * 2].split())
    for _ in range(4):
        bullet = _BULLET.match(line + " ")
        if bullet is None:
            break
        line = line[bullet.end() :].strip()
    return line[:MAX_ITEM_LEN].rstrip()


def _tidy_decision(value: str | TaskDecision) -> TaskDecision:
    if isinstance(value, TaskDecision):
        others = (_tidy(v).replace("]", ")").replace(";", ",") for v in value.alternatives)
        return TaskDecision(_tidy(value.text), _tidy(value.rationale), tuple(v for v in others if v))
    text, against, why = _tidy(value), "", ""
    rejected = _NOT.search(text)
    if rejected:
        text, against = text[: rejected.start()], rejected.group(1)
    reason = _WHY.search(text)
    if reason:
        text, why = text[: reason.start()], reason.group(1)
    return TaskDecision(text, why, tuple(v.strip() for v in against.split(";") if v.strip()))
