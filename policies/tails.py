"""Where the kept tail begins: by tokens, by messages, by turns, or by the share that goes; always at a unit's start."""

import math
from collections.abc import Callable, Mapping

from policies.bounds import Bounds
from policies.draft import Draft
from policies.turns import parse_turn_boundaries

FEWEST_TURNS = 2  # fewer, and steps are counted instead: one user message may have sixty of them


def tail_by_tokens(draft: Draft, bounds: Bounds, budget: int) -> int:
    """Index of the first message of a tail of whole units that takes at most ``budget`` tokens."""
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    verbatim = bounds.protection.verbatim
    start = _newest(draft, bounds)
    for unit in reversed(bounds.steps):
        if unit.start >= start:
            budget -= sum(tokens.get(i, 0) for i in unit.indices if i not in verbatim)
            continue
        if any(i not in tokens for i in unit.indices):
            break
        budget -= sum(tokens[i] for i in unit.indices if i not in verbatim)
        if budget < 0:
            break
        start = unit.start
    return start


def tail_by_messages(draft: Draft, bounds: Bounds, count: int) -> int:
    """Index of the first of the newest ``count`` messages, rounded out to the unit that it stands in."""
    wanted = len(draft.transcript.messages) - count
    starts = [unit.start for unit in bounds.steps if unit.start <= wanted]
    return min(_newest(draft, bounds), starts[-1] if starts else draft.transcript.head)


def tail_by_turns(draft: Draft, bounds: Bounds, count: int) -> int:
    """Index of the first of the newest ``count`` turns; of as many steps where there are fewer than two turns."""
    turns = parse_turn_boundaries(draft.transcript.messages)
    starts = turns if len(turns) >= FEWEST_TURNS else tuple(unit.start for unit in bounds.steps)
    if count >= len(starts):
        return draft.transcript.head
    return min(_newest(draft, bounds), starts[-count] if count else len(draft.transcript.messages))


def tail_by_share(draft: Draft, bounds: Bounds, gone: float) -> int:
    """Index of the first message that stays if the oldest share ``gone`` of all messages goes, rounded up to a unit."""
    head, total = draft.transcript.head, len(draft.transcript.messages)
    wanted = head + math.ceil(round(gone * (total - head), 6))
    starts = [unit.start for unit in bounds.steps if unit.start >= wanted]
    return min(_newest(draft, bounds), starts[0] if starts else total)


def _newest(draft: Draft, bounds: Bounds) -> int:
    """Where the active unit begins, which always stays."""
    return min(bounds.protection.active, default=len(draft.transcript.messages))


TAILS: Mapping[str, Callable[[Draft, Bounds, int | float], int]] = {
    "keep_messages": lambda draft, bounds, value: tail_by_messages(draft, bounds, int(value)),
    "keep_turns": lambda draft, bounds, value: tail_by_turns(draft, bounds, int(value)),
    "evict_pct": lambda draft, bounds, value: tail_by_share(draft, bounds, value / 100),
}
"""Parameters that say what stays, the first one that is given: messages, turns, or the percentage that goes."""


def tail_start(draft: Draft, bounds: Bounds, budget: int) -> int:
    """Index of the first message of the kept tail, as the layer's parameters say; else by ``budget`` tokens."""
    params = bounds.layer.params
    for name, start in TAILS.items():
        value = params.get(name)
        if isinstance(value, int | float):
            return start(draft, bounds, value)
    return tail_by_tokens(draft, bounds, budget)
