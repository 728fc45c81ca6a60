"""Why an answer ended at a length: the model wrote as much as it was asked for, or the window left it less.

OpenAI's ``length`` says both. The first is the client's own wish and is only reported; after the second one the
reserve was too small, and the answer is not whole.
"""

from collections.abc import Sequence
from enum import StrEnum

from proxy.upstream.overflow import LENGTHS, WINDOW_FULL, Kind, classify_answer


class Ending(StrEnum):
    """What stopped an answer before its own end."""

    OUTPUT_CAP = "output_cap"
    RESERVE_EXHAUSTED = "reserve_exhausted"


def is_cut_short(reasons: Sequence[str]) -> bool:
    """Whether any of the finish reasons is about a length."""
    return any(reason in LENGTHS for reason in reasons)


def ending_of(
    reasons: Sequence[str],
    *,
    prompt: int | None,
    completion: int | None,
    max_tokens: int | None,
    window: int | None,
    clamped: bool = False,
) -> Ending | None:
    """What stopped an answer with these finish reasons; None if it came to its own end.

    Args:
        reasons: one for each choice; with several of them ``completion`` is the sum of all, and says nothing.
        prompt: tokens as reported, else as estimated; None if neither is known.
        completion: tokens as reported.
        max_tokens: what the client asked for.
        window: tokens as Weir believes them.
        clamped: Weir asked for less than the client did, because the window left no more.
    """
    if not is_cut_short(reasons):
        return None
    if clamped or WINDOW_FULL in reasons:
        return Ending.RESERVE_EXHAUSTED
    if completion is None or len(reasons) > 1:
        full = None not in (prompt, max_tokens, window) and (window or 0) - (prompt or 0) < (max_tokens or 0)
        return Ending.RESERVE_EXHAUSTED if full else Ending.OUTPUT_CAP
    verdict = classify_answer("length", prompt=prompt, completion=completion, max_tokens=max_tokens, window=window)
    return Ending.OUTPUT_CAP if verdict.kind is Kind.NONE else Ending.RESERVE_EXHAUSTED
