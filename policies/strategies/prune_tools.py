"""``prune_tools``: definitions of tools that nobody uses are left out while they take more than
their bucket holds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.draft import Bounds, Draft, Strategy, whole
from policies.ledger import Edit, EditKind
from policies.messages import ToolDefinition, Tools

NEVER = -1


NAME_WEIGHT = 2


_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


_WORD = re.compile(r"[^\W_]{2,}|\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneTools(Strategy):
    """The least used definitions go: first those never called, then those called longest ago.

    What the newest user message mentions goes last. ``steps`` newest steps count as use; of those
    never called, ``top_k`` are kept. What is left out is decided once: the tools precede everything
    that the provider's cache could hold. Never left out are a tool that the request names, one
    whose call is in the history that is sent, and the last one.
    """

    name = "prune_tools"
    steps: int = whole(10)
    top_k: int | None = whole(None)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        excess = draft.tokens - bounds.target
        cap = bounds.budget.caps.get("tools")
        if (
            excess <= 0
            or not draft.tools
            or (cap is not None and draft.tools <= bounds.budget.room_for(cap))
        ):
            return draft
        tools = bounds.transcript.read_tools()
        pruned = {definition.name for definition in draft.pruned}
        sent = [definition for definition in tools.definitions if definition.name not in pruned]
        chosen = self._chosen(self._dispensable(draft, tools, sent), bounds, excess=excess)[
            : len(sent) - 1
        ]
        dropped = {definition.name for definition in chosen}
        gone = [definition for definition in sent if definition.name in dropped]
        kind = EditKind.PRUNE_TOOLS
        return draft.with_tools_pruned(
            gone, [Edit(d.digest, 0, kind, "", d.digest.hex()[:12], 0) for d in gone]
        )

    def _dispensable(
        self, draft: Draft, tools: Tools, sent: Sequence[ToolDefinition]
    ) -> list[tuple[int, ToolDefinition]]:
        visible = {piece.index for piece in draft.pieces}
        calling = [i for i, message in enumerate(draft.transcript.messages) if message.call_ids]
        recent = set(calling[-self.steps :]) if self.steps > 0 else set[int]()
        last: dict[str, int] = {}
        needed = set(tools.chosen)
        for index in calling:
            for call in draft.transcript.read(index).calls:
                last[call.name] = index
                if index in visible or index in recent:
                    needed.add(call.name)
        return [(last.get(d.name, NEVER), d) for d in sent if d.name not in needed]

    def _chosen(
        self, dispensable: list[tuple[int, ToolDefinition]], bounds: Bounds, *, excess: int
    ) -> list[ToolDefinition]:
        unused = _least_relevant_first([d for used, d in dispensable if used == NEVER], bounds)
        used = [
            d
            for _, d in sorted(
                ((at, d) for at, d in dispensable if at != NEVER), key=lambda found: found[0]
            )
        ]
        at_once = 0 if self.top_k is None else max(0, len(unused) - self.top_k)
        found: list[ToolDefinition] = []
        for definition in (*unused, *used):
            if excess <= 0 and len(found) >= at_once:
                break
            found.append(definition)
            excess -= definition.tokens
        return found


def _least_relevant_first(
    definitions: Sequence[ToolDefinition], bounds: Bounds
) -> list[ToolDefinition]:
    current = bounds.protection.current
    asked = (
        _words(bounds.transcript.read(current).text) if current is not None else frozenset[str]()
    )
    names = [_words(d.name) & asked for d in definitions]
    texts = [
        _words(d.description) & asked | name for d, name in zip(definitions, names, strict=True)
    ]
    holders: dict[str, int] = {}
    for term in (term for terms in texts for term in terms):
        holders[term] = holders.get(term, 0) + 1
    scores = [
        sum((NAME_WEIGHT if term in name else 1) / holders[term] for term in sorted(terms))
        for name, terms in zip(names, texts, strict=True)
    ]
    return [definitions[i] for i in sorted(range(len(definitions)), key=lambda i: (scores[i], -i))]


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(_HUMP.sub(" ", text)))
