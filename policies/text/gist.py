"""One message in few words, all of them its own: what stands where its content was."""

import re
from collections.abc import Sequence

from policies.text.extract import Item, Weights, choose, fitted, is_alone, joined
from policies.text.output import error_lines, reports_error, without_line_numbers
from policies.text.segments import Segment, Source, TextReading, is_identifier, parse, structured, terms_of
from policies.tokens import TokenCounter

MAX_ARGUMENT_LEN = 60
MAX_VALUE_LEN = 48
KEY_ARGUMENTS = 2
REPORTED = 6.0
"""A line that reports an error is worth so many times its words."""
_LOOSE = " \n,;:-\u2013\u2014([…"


def gist(
    text: str,
    *,
    role: str = "tool",
    known: str = "",
    max_tokens: int,
    counter: TokenCounter,
    whole: bool = False,
    between: str = "\n",
) -> str:
    """The segments of a text that tell most within ``max_tokens``, in their order, beside what is ``known``.

    ``whole`` asks for every line that reports an error: empty where they do not fit. Where no segment fits, the
    beginning of the best.
    """
    if max_tokens <= 0:
        return ""
    text = without_line_numbers(text) if role == "tool" else text
    if whole and counter.count(between.join(error_lines(text))) > max_tokens:
        return ""
    items = _items(text, role)
    ranked = choose(items, 2 * max_tokens, shown=terms_of(known))
    if whole:
        ranked.sort(key=lambda group: not reports_error(items[group[0]].segment.text))
    found = fitted(ranked, lambda chosen: _shown(items, chosen, between), max_tokens=max_tokens, counter=counter)
    if found.text or not items:
        return found.text
    best = max(items, key=lambda item: item.factor * sum(item.weights))
    return clip(best.segment.text, max_tokens=max_tokens, counter=counter)


def _items(text: str, role: str) -> list[Item]:
    segments = [s for s in TextReading(Source(0, role, text)).segments if s.terms]
    weights = Weights([frozenset(s.terms) for s in segments])
    return [
        Item(
            source=0,
            place=place,
            segment=segment,
            weights=weights.of(segment.terms),
            factor=(REPORTED if role == "tool" and reports_error(f"{segment.key} {segment.text}") else 1.0)
            * (2.0 if is_alone(segment) else 1.0),
            cost=len(segment.text) / 4 + len(segment.key) / 8 + 1,
        )
        for place, segment in enumerate(segments)
    ]


def _shown(items: Sequence[Item], chosen: Sequence[int], between: str) -> str:
    return joined([items[n] for n in sorted(chosen)], gap=between)


def key_argument(arguments: str) -> str:
    """The argument values that tell a call from its siblings, at most two, at most 60 characters."""
    document = parse(arguments)
    found = list(structured(document)) if document is not None else []
    ranked = sorted(range(len(found)), key=lambda i: (-_telling(found[i]), i))[:KEY_ARGUMENTS]
    values = [found[i].text for i in sorted(ranked)]
    text = ", ".join(shorten(" ".join(v.split()), MAX_VALUE_LEN) for v in values) or " ".join(arguments[:400].split())
    if len(text) <= MAX_ARGUMENT_LEN or len(values) < KEY_ARGUMENTS:
        return shorten(text, MAX_ARGUMENT_LEN)
    return shorten(" ".join(found[ranked[0]].text.split()), MAX_ARGUMENT_LEN)


def _telling(pair: Segment) -> float:
    if any(is_identifier(term) for term in pair.terms):
        return 2.0
    return 1.0 if pair.terms and not pair.text.isdigit() and pair.text not in {"true", "false"} else 0.0


def placeholder(text: str, *, tool: str, arguments: str, ref: str, max_tokens: int = 50, counter: TokenCounter) -> str:
    """What stands in place of a removed result: tool, key argument, what it found, and where the full text is."""
    name = re.sub(r"\s+", " ", tool)[:64] or "tool"
    argument = _harmless(key_argument(arguments))

    def line(called: str, found: str) -> str:
        said = f": {found}" if found else ""
        return f"[weir: result of {called} removed{said}. Archived as {ref}]"

    for called in dict.fromkeys((f"{name}({argument})", f"{name}({shorten(argument, 24)})", name)):
        room = max_tokens - counter.count(line(called, "")) - 2
        if room < 0:
            continue
        found = gist(text, known=f"{tool} {arguments}", max_tokens=room, counter=counter, between=" … ")
        found = _harmless(found)
        while found and counter.count(line(called, found.rstrip("."))) > max_tokens:
            room -= 1
            found = clip(found, max_tokens=room, counter=counter)
        return line(called, found.rstrip("."))
    return clip(f"[weir: {name} removed, archived as {ref}]", max_tokens=max_tokens, counter=counter)


def _harmless(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace("\n", " ")


def shorten(text: str, longest: int) -> str:
    """``text`` in at most so many characters, cut between words.

    Of one word that is longer, a path keeps its last parts and anything else its two ends, the cut marked.
    """
    if len(text) <= longest:
        return text
    at = _edge(text, longest - 1)
    if at > longest // 3:
        return f"{text[:at].rstrip(_LOOSE)}…"
    part = text.find("/", len(text) - longest + 1)
    if 0 < part < len(text) - 1:
        return f"…{text[part:]}"
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def clip(text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    """The longest head of ``text`` within ``max_tokens`` that ends between words, an ellipsis where it was cut.

    Empty where not even the first word fits.
    """
    if max_tokens <= 0:
        return ""
    if len(text) <= max_tokens * 16 and counter.count(text) <= max_tokens:
        return text
    low, high = 0, min(len(text), max_tokens * 16)
    while low < high:
        middle = (low + high + 1) // 2
        if counter.count(_ended(text, middle)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return _ended(text, low)


def _edge(text: str, at: int) -> int:
    """The last place up to ``at`` where no word, path or number is cut; 0 where there is none."""
    if at >= len(text) or text[at].isspace():
        return min(at, len(text))
    return max(text.rfind(" ", 0, at), text.rfind("\n", 0, at), 0)


def _ended(text: str, at: int) -> str:
    kept = text[: _edge(text, at)].rstrip(_LOOSE)
    return f"{kept}…" if kept else ""
