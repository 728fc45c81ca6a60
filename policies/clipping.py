"""Shortening a text: its beginning and its end say most.

:func:`clip_middle` is for what has to fit somewhere, :func:`cap_text` for a tool result above its cap. What the
latter leaves has a line of JSON where it was cut, which says where to read on::

    {"truncated": true, "ref": "0123456789ab.txt", "next_cursor": 4938}

``ref`` names the text in the archive, ``next_cursor`` is the byte of its UTF-8 form at which the shown beginning
ends, so that a reader of the archive goes on exactly there.
"""

import json
from collections.abc import Callable
from typing import Literal

from policies.tokens import TokenCounter

HEAD_SHARE = 0.6
MIN_KEPT = 16
MIN_SIDES = 64
TEXT_OF = ".txt"

Method = Literal["middle_out", "head", "tail"]


def clip_middle(text: str, max_tokens: int, *, counter: TokenCounter, ref: str) -> str:
    """``text`` with its middle replaced by a note that names the archive's ref; at most ``max_tokens``.

    A text that is small enough comes back as it is. The note itself is kept even where ``max_tokens`` is
    smaller than it.
    """
    total = counter.count(text)
    if total <= max_tokens:
        return text
    kept = max(0, max_tokens - _note_tokens(total, ref, counter))
    while kept >= MIN_KEPT:
        clipped = _cut(text, kept / total, total - kept, ref)
        size = counter.count(clipped)
        if size <= max_tokens:
            return clipped
        kept = min(kept - 1, int(kept * max_tokens / size * 0.98))
    return _note(total, ref)


def cap_text(
    text: str, max_tokens: int, *, counter: TokenCounter, ref: str, method: Method = "middle_out", whole: bool = True
) -> str:
    """``text`` shortened to ``max_tokens``, never longer than it was; as it is where it is small enough.

    Beginning and end are of equal length (``middle_out``), or one of them is all that stays. Where there is no
    room for two sides worth reading, the beginning stays with the JSON line, and where there is no room for that line
    either, the beginning alone. ``whole`` is False where ``text`` is not what the archive holds, and
    reading on therefore starts at its beginning.
    """
    total = counter.count(text)
    if total <= max_tokens:
        return text
    for sides, smallest in ((_SIDES[method], MIN_SIDES), (_beginning, MIN_KEPT)):
        kept = int(len(text) * max_tokens / total)
        while kept >= smallest:
            head, tail = sides(text, kept)
            line = cut_line(ref, len(head.encode("utf-8", "surrogatepass")) if whole else 0)
            shown = "\n".join(part for part in (head, line, tail) if part)
            size = counter.count(shown)
            if size <= max_tokens and len(shown) < len(text):
                return shown
            kept = min(kept - 1 - max(0, len(shown) - len(text)), int(kept * max_tokens / size))
    return _bare(text, int(len(text) * max_tokens / total), max_tokens, counter)


def _bare(text: str, kept: int, max_tokens: int, counter: TokenCounter) -> str:
    """The beginning alone, of one character at the least: an upstream may refuse an empty result."""
    while kept > 1 and counter.count(text[:kept]) > max_tokens:
        kept -= 1 + kept // 20
    return text[: max(1, kept)]


def cut_line(ref: str, cursor: int) -> str:
    """The line that says that a text was cut, and where the archive's text of ``ref`` goes on (a byte)."""
    return json.dumps({"truncated": True, "ref": ref + TEXT_OF, "next_cursor": cursor})


def _both(text: str, kept: int) -> tuple[str, str]:
    return text[: kept // 2], text[len(text) - (kept - kept // 2) :]


def _beginning(text: str, kept: int) -> tuple[str, str]:
    return text[:kept], ""


def _ending(text: str, kept: int) -> tuple[str, str]:
    return "", text[len(text) - kept :]


_SIDES: dict[Method, Callable[[str, int], tuple[str, str]]] = {
    "middle_out": _both,
    "head": _beginning,
    "tail": _ending,
}
"""What is shown of a text of which so many characters stay: its beginning and its end."""


def _cut(text: str, share: float, removed: int, ref: str) -> str:
    keep = max(2, int(len(text) * share))
    head = int(keep * HEAD_SHARE)
    return f"{text[:head]}\n{_note(removed, ref)}\n{text[len(text) - (keep - head) :]}"


def _note(removed: int, ref: str) -> str:
    return f"[weir: about {removed} tokens left out here; archived as {ref}]"


def _note_tokens(total: int, ref: str, counter: TokenCounter) -> int:
    return counter.count(_note(total, ref)) + 2
