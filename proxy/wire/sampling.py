"""Tokens of much text, counted in part: enough to know that nothing has to be done about it."""

from collections.abc import Sequence
from itertools import islice

from proxy.wire.counting import Countable, TextCounter

SLICE = 128
CUT_TOKENS, CUT_SHARE = 1.8, 0.06
"""What a slice has more than its share of the text: its line's end, and words that were cut in two."""
MAX_ERROR = 0.10
"""The share by which the tokens of at least 64 KB of text may be wrong that were counted by slices; in recorded
conversations it is 0.05 at most (``tests/functional/test_sampled_counts.py``)."""


async def sample_all(items: Sequence[Countable], counter: TextCounter) -> list[int]:
    samples = [_slices(text) for item in items for text in item.texts]
    counts = await counter.count_many(["\n".join(slices) for slices in samples])
    whole = (text for item in items for text in item.texts)
    sizes = iter(
        [
            count if len(slices) == 1 else _scaled(count, slices, len(text))
            for text, slices, count in zip(whole, samples, counts, strict=True)
        ]
    )
    return [max(0, item.fixed + sum(islice(sizes, len(item.texts)))) for item in items]


def _slices(text: str) -> list[str]:
    if len(text) <= 4 * SLICE:
        return [text]
    number = max(2, round(len(text) / (8 * SLICE)))
    step = len(text) / number
    return [text[(at := int((n + 0.5) * step - SLICE / 2)) : at + SLICE] for n in range(number)]


def _scaled(count: int, slices: Sequence[str], size: int) -> int:
    cut = min(CUT_TOKENS * (len(slices) - 1), CUT_SHARE * count)
    return max(1, round((count - cut) * size / sum(map(len, slices))))
