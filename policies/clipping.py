"""Shortening a text in the middle: its beginning and its end say most."""

from policies.tokens import TokenCounter

HEAD_SHARE = 0.6
SMALLEST_KEPT = 16


def clip_middle(text: str, max_tokens: int, *, counter: TokenCounter, ref: str) -> str:
    """``text`` with its middle replaced by a note that names the archive's ref; at most ``max_tokens``.

    A text that is small enough comes back as it is. The note itself is kept even where ``max_tokens`` is
    smaller than it.
    """
    total = counter.count(text)
    if total <= max_tokens:
        return text
    kept = max(0, max_tokens - _note_tokens(total, ref, counter))
    while kept >= SMALLEST_KEPT:
        clipped = _cut(text, kept / total, total - kept, ref)
        size = counter.count(clipped)
        if size <= max_tokens:
            return clipped
        kept = min(kept - 1, int(kept * max_tokens / size * 0.98))
    return _note(total, ref)


def _cut(text: str, share: float, removed: int, ref: str) -> str:
    keep = max(2, int(len(text) * share))
    head = int(keep * HEAD_SHARE)
    return f"{text[:head]}\n{_note(removed, ref)}\n{text[len(text) - (keep - head) :]}"


def _note(removed: int, ref: str) -> str:
    return f"[weir: about {removed} tokens left out here; full text: recall {ref}]"


def _note_tokens(total: int, ref: str, counter: TokenCounter) -> int:
    return counter.count(_note(total, ref)) + 2
