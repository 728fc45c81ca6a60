"""Dividing a transcript among questions: whole calls with their results, long lines in parts, nothing unread.

Only where there would be more chunks than are allowed are the longest lines cut in the middle, and if that is not
enough, lines in the middle left out with a note that says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.clipping import clip_middle
from policies.summaries.transcript import Line, written_out
from policies.tokens import TokenCounter

PER_LINE = 3
"""Tokens that a line may cost beside its text: two halves of a token, and the line's end."""
PER_PART = 12
SMALLEST_LINE = 24
ARCHIVE = "original"


@dataclass(frozen=True, slots=True)
class Sized:
    """A harmless line and the tokens that it takes in a transcript."""

    line: Line
    tokens: int


def sized(lines: Sequence[Line], counter: TokenCounter) -> list[Sized]:
    """The lines with their tokens."""
    return [Sized(line, counter.count(written_out(line)) + PER_LINE) for line in lines]


def divide(lines: Sequence[Sized], room: int, *, most: int, counter: TokenCounter) -> list[list[Sized]]:
    """Consecutive chunks of at most ``room`` tokens each, ``most`` chunks at the most, of about the same size."""
    total = sum(s.tokens for s in lines)
    if total <= room:
        return [list(lines)]
    chunks = _pack(lines, room, counter)
    for share in (0.9, 0.7, 0.5, 0.3):
        if len(chunks) <= most:
            return chunks
        chunks = _pack(_clipped(lines, int(room * most * share), counter), room, counter)
    if len(chunks) <= most:
        return chunks
    half = max(1, most // 2)
    left_out = sum(len(c) for c in chunks[half : len(chunks) - (most - half)])
    note = Sized(Line("omitted", f"{left_out} lines are left out here"), PER_PART + PER_LINE)
    tail = chunks[len(chunks) - (most - half) :] if most > half else []
    first = chunks[half - 1]
    if sum(s.tokens for s in first) + note.tokens <= room:
        first.append(note)
    return [*chunks[:half], *tail]


def _clipped(lines: Sequence[Sized], budget: int, counter: TokenCounter) -> list[Sized]:
    """The lines within about ``budget`` tokens: the longest are cut in the middle, to the same length."""
    sizes = sorted(s.tokens for s in lines)
    left, cap = budget, SMALLEST_LINE
    for n, size in enumerate(sizes):
        cap = left // (len(sizes) - n)
        if size > cap:
            break
        left -= size
    cap = max(SMALLEST_LINE, cap)
    return [s if s.tokens <= cap else _clip(s, cap, counter) for s in lines]


def _clip(one: Sized, cap: int, counter: TokenCounter) -> Sized:
    text = clip_middle(one.line.text, cap, counter=counter, ref=ARCHIVE)
    return sized([replace(one.line, text=text)], counter)[0]


def _pack(lines: Sequence[Sized], room: int, counter: TokenCounter) -> list[list[Sized]]:
    total = sum(s.tokens for s in lines)
    even = min(room, total // -(-total // room) + room // 10)
    chunks: list[list[Sized]] = [[]]
    used = 0
    for group in _groups(lines):
        size = sum(s.tokens for s in group)
        parts = [group] if size <= room else [[p] for s in group for p in _parts(s, room, counter)]
        for part in parts:
            tokens = sum(s.tokens for s in part)
            if chunks[-1] and used + tokens > (even if len(parts) == 1 else room):
                chunks.append([])
                used = 0
            chunks[-1].extend(part)
            used += tokens
    return chunks


def _groups(lines: Sequence[Sized]) -> Iterator[list[Sized]]:
    """What is not to be separated: an assistant's words, its calls, and the results of the calls."""
    group: list[Sized] = []
    for one in lines:
        line, before = one.line, group[-1].line if group else None
        joins = before is not None and (
            (line.is_result and (before.is_call or before.is_result))
            or (line.is_call and not before.is_result and (before.is_call or before.origin == "assistant"))
        )
        if group and not joins:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _parts(one: Sized, room: int, counter: TokenCounter) -> list[Sized]:
    """A line in consecutive parts of at most ``room`` tokens; a part says which it is of how many."""
    if one.tokens <= room:
        return [one]
    inner = max(1, room - PER_PART - PER_LINE - counter.count(one.line.origin))
    texts = split_text(one.line.text, inner, counter=counter)
    many = len(texts)
    origin = one.line.origin
    return sized([Line(f"{origin}, part {n} of {many}", text) for n, text in enumerate(texts, 1)], counter)


def split_text(text: str, most: int, *, counter: TokenCounter) -> list[str]:
    """``text`` in consecutive parts of at most ``most`` tokens, ended between words where there is a place."""
    total = counter.count(text)
    if total <= most:
        return [text]
    size = max(1, len(text) * most // total)
    parts: list[str] = []
    at = 0
    while at < len(text):
        end = _edge(text, at, min(len(text), at + size))
        while end - at > 1 and (tokens := counter.count(text[at:end])) > most:
            end = at + max(1, min(end - at - 1, (end - at) * most // tokens))
        parts.append(text[at:end])
        at = end
    return parts


def _edge(text: str, start: int, end: int) -> int:
    """The last place between words in the last eighth before ``end``, ``end`` itself where there is none."""
    if end >= len(text):
        return end
    least = end - (end - start) // 8
    found = max(text.rfind("\n", least, end), -1)
    if found < 0:
        found = max(text.rfind(" ", least, end), text.rfind(",", least, end))
    return found + 1 if found >= least and found + 1 > start else end
