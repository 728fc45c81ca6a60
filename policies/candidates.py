"""What may be evicted from a draft, as blocks that a scorer can weigh.

==============  =============================================================================================
system, tools   never
user            only where the policy names it, never the task or the newest, never a brief one: it is said on purpose
assistant       never by itself: only a summary that covers it lets it go
tool results    yes, the main target
memory          yes
==============  =============================================================================================
"""

from collections.abc import Mapping
from typing import NamedTuple

from policies.bounds import Bounds
from policies.draft import Draft
from policies.ledger import CONDENSED, SHORTENED
from policies.messages import ToolCall, same_call
from policies.pieces import Piece
from policies.scoring.blocks import Block, ContentType, step_numbers
from policies.scoring.references import References, last_references

DEFAULT_TYPES = (ContentType.TOOL_RESULT.value, ContentType.MEMORY.value)
EVICTABLE = frozenset({ContentType.USER, ContentType.TOOL_RESULT, ContentType.MEMORY})
IMPORTANT = "IMPORTANT"
BRIEF = 100
"""Tokens."""


class _Facts(NamedTuple):
    steps: tuple[int, ...]
    used: Mapping[int, References]
    superseded: frozenset[int]


def candidates(draft: Draft, bounds: Bounds, *, types: tuple[str, ...] = DEFAULT_TYPES) -> list[Block]:
    """The blocks of ``types`` that are neither protected, nor out of the layer's scope, nor gone already."""
    calls = bounds.calls()
    facts = _Facts(
        steps=step_numbers(draft.transcript.messages),
        used=last_references(draft.transcript, calls),
        superseded=_superseded(calls),
    )
    guarded = bounds.protection.all
    found: list[Block] = []
    for piece in draft.pieces:
        if piece.index is None or piece.index in guarded or not bounds.in_scope(draft, piece):
            continue
        if piece.text is not None and piece.kind not in SHORTENED | CONDENSED:
            continue
        block = _block(draft, piece, piece.index, facts)
        if block.kind not in EVICTABLE or block.kind not in types:
            continue
        if block.kind is not ContentType.USER or draft.transcript.messages[piece.index].tokens > BRIEF:
            found.append(block)
    return found


def _block(draft: Draft, piece: Piece, index: int, facts: _Facts) -> Block:
    message = draft.transcript.messages[index]
    kind = _kind(draft, index)
    age = facts.steps[-1] - facts.steps[index]
    used = facts.used.get(index, References())
    return Block(
        index=index,
        id=message.digest.hex(),
        kind=kind,
        tokens=piece.tokens,
        age=age,
        idle=age if used.step is None else facts.steps[-1] - used.step,
        references=used.count,
        superseded=index in facts.superseded,
        important=kind is not ContentType.TOOL_RESULT and IMPORTANT in draft.transcript.read(index).text,
        keep=message.keep,
        behind=len(draft.transcript.messages) - index,
    )


def _kind(draft: Draft, index: int) -> ContentType:
    message = draft.transcript.messages[index]
    if index in draft.transcript.memory:
        return ContentType.MEMORY
    if message.is_head:
        return ContentType.SYSTEM
    if message.is_result:
        return ContentType.TOOL_RESULT
    return ContentType.USER if message.role == "user" else ContentType.ASSISTANT


def _superseded(calls: Mapping[int, ToolCall]) -> frozenset[int]:
    """Indices of results that a later call of the same tool with the same arguments replaced."""
    newest: dict[tuple[str, str], int] = {}
    for index, call in calls.items():
        newest[same_call(call)] = index
    return frozenset(i for i, call in calls.items() if newest[same_call(call)] != i)
