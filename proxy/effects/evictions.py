"""What a batch did, for the audit: how far it had to go, what it took out, and which calls ask for it again.

The rows of a batch add up: what they set free is what the request was before the batch less what it is after it,
placeholders, markers and summaries included.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b

from policies.decision import Decision
from policies.ledger import ADDING, ConversationState, Cut, EditKind
from policies.messages import ToolCall, Transcript, answered_calls, count_occurrences, same_call, units
from policies.settings import ContextSettings
from policies.summary.prompts import PROMPTS
from proxy.store.records import EvictionRow

HASH_SIZE = 16
GONE = frozenset({EditKind.EVICT, EditKind.PRUNE})
CUT = "cut"


def call_hash(call: ToolCall) -> bytes:
    """16 bytes that two calls of one tool with the same arguments share, however these are spelt."""
    name, arguments = same_call(call)
    return blake2b(f"{name}\0{arguments}".encode("utf-8", "surrogatepass"), digest_size=HASH_SIZE).digest()


def evictions_of(
    transcript: Transcript, decision: Decision, known: ConversationState, *, settings: ContextSettings
) -> tuple[EvictionRow, ...]:
    if not decision.is_new:
        return ()
    batch = _Batch(transcript, decision, known, settings)
    return (*batch.edits(), *batch.covered())


def evicted_calls(rows: Sequence[EvictionRow], branch: str) -> dict[bytes, str]:
    return {row.call_hash: branch for row in rows if row.call_hash and (row.kind in GONE or row.kind == CUT)}


def asked_again(evicted: Mapping[bytes, str], transcript: Transcript, length: int) -> tuple[tuple[str, bytes], ...]:
    """The evicted calls that are among the messages after the first ``length``, as (branch, hash).

    Nothing but new messages is read unless one of them matches: then the array must hold the earlier call too,
    because a conversation that was rewound makes its calls anew.
    """
    if not evicted:
        return ()
    head, new = transcript.head, transcript.head + length
    found = {call: evicted[call] for call in _calls(transcript, new, len(transcript.messages)) if call in evicted}
    if not found:
        return ()
    earlier = set(_calls(transcript, head, new))
    return tuple((branch, call) for call, branch in found.items() if call in earlier)


def _calls(transcript: Transcript, start: int, stop: int) -> Iterator[bytes]:
    for index in range(start, stop):
        if transcript.messages[index].call_ids:
            yield from map(call_hash, transcript.read(index).calls)


class _Batch:
    def __init__(
        self, transcript: Transcript, decision: Decision, known: ConversationState, settings: ContextSettings
    ) -> None:
        self._transcript = transcript
        self._decision = decision
        self._known = known
        self._settings = settings
        self._occurrences = transcript.occurrences or count_occurrences(transcript.messages)
        self._old = _newest_cut(transcript, known.cuts)
        self._hidden = frozenset() if self._old is None else frozenset(_hidden(transcript, self._old))
        affected = {*decision.removed}
        steps = [u for u in units(transcript.messages, transcript.head) if affected.intersection(u.indices)]
        self._calls = answered_calls(transcript, steps)
        self._kept = tuple(report.layer for report in decision.trail if report.kept)

    def edits(self) -> Iterator[EvictionRow]:
        places = {self._key(i): i for i in self._decision.removed}
        for edit in self._decision.edits:
            if edit.kind in ADDING:
                continue
            layer = self._layer(str(edit.kind))
            if edit.kind is EditKind.PRUNE_TOOLS:
                defined = {d.digest: d for d in self._transcript.read_tools().definitions}.get(edit.digest)
                if defined is not None:
                    yield self._row(edit.key, edit.kind, layer, before=defined.tokens, after=0, tool=defined.name)
            elif (index := places.get(edit.key)) is not None:
                before, call = self._tokens(index), self._calls.get(index)
                yield self._row(edit.key, edit.kind, layer, before=before, after=edit.tokens, call=call)

    def covered(self) -> Iterator[EvictionRow]:
        cut = self._decision.cut
        if cut is None:
            return
        rest = self._old.tokens if self._old is not None and self._old.text else 0
        for index in self._decision.covered:
            if index in self._hidden:
                continue
            key, tokens, call = self._key(index), self._tokens(index), self._calls.get(index)
            known = self._known.edits.get(key)
            if call is None or (known is not None and known.kind in GONE):
                rest += tokens
            else:
                yield self._row(key, CUT, cut.layer, before=tokens, after=0, call=call)
        yield self._row((cut.prefix, 0), CUT, cut.layer, before=rest, after=cut.tokens if cut.text else 0)

    def _row(
        self,
        key: tuple[bytes, int],
        kind: str,
        layer: str,
        *,
        before: int,
        after: int,
        call: ToolCall | None = None,
        tool: str = "",
    ) -> EvictionRow:
        return EvictionRow(
            digest=key[0],
            occurrence=key[1],
            kind=str(kind),
            layer=layer,
            policy=self._settings.name,
            scorer=self._scorer(layer),
            tool=tool if call is None else call.name,
            call_hash=b"" if call is None else call_hash(call),
            tokens_before=before,
            tokens_after=after,
            tokens_remaining=self._decision.raw_after,
        )

    def _key(self, index: int) -> tuple[bytes, int]:
        return self._transcript.messages[index].digest, self._occurrences[index]

    def _tokens(self, index: int) -> int:
        edit = self._known.edits.get(self._key(index))
        return self._transcript.messages[index].tokens if edit is None else edit.tokens

    def _layer(self, kind: str) -> str:
        return next((name for name in self._kept if name.startswith(kind)), kind)

    def _scorer(self, layer: str) -> str:
        own = (each.params.get("scorer") for each in self._settings.layers if each.strategy == layer)
        return next((str(name) for name in own if name is not None), "")


def _newest_cut(transcript: Transcript, cuts: Sequence[Cut]) -> Cut | None:
    chain = transcript.chain
    there = (c for c in reversed(cuts) if 0 < c.covers <= len(chain) and chain[c.covers - 1] == c.prefix)
    return next(there, None)


def _hidden(transcript: Transcript, cut: Cut) -> Iterator[int]:
    stays = {*cut.before, *cut.after}
    return (transcript.head + p for p in range(cut.covers) if p not in stays)


MAX_CONDENSED = 40
MAX_LAYERS = 32


def figures_of(decision: Decision, settings: ContextSettings, *, base: int) -> dict[str, object]:
    """What the audit says of a batch: the decision record (requirement A0.148), and what was condensed.

    ``base`` is the denominator of the pressure, tokens.
    """
    figures: dict[str, object] = {
        "policy": settings.name,
        "action": decision.stage(settings, base=base),
        "utilization_before": round(decision.before / base, 4),
        "utilization_after": round(decision.after / base, 4),
        "compression_strategy": decision.strategy,
        "new_window_id": decision.window_id,
    }
    condensed = condensed_in(decision)
    return figures | {"condensed": condensed} if condensed else figures


def condensed_in(decision: Decision) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for report in decision.trail:
        for each in report.condensed[: MAX_CONDENSED - len(found)]:
            digest = next((p.digest for p in PROMPTS.values() if p.purpose == each.purpose), None)
            row = {**asdict(each), "ratio": round(each.ratio, 2), "kept": report.kept}
            found.append(row if digest is None else row | {"prompt_digest": digest})
    return found


def layers_in(decision: Decision) -> list[dict[str, object]]:
    return [
        {
            "layer": report.layer,
            "scope": report.scope,
            "tokens_before": report.before,
            "tokens_after": report.after,
            "units": report.units,
            "kept": report.kept,
            "rung": report.rung,
            "reason": report.reason or None,
            "ref": report.ref,
        }
        for report in decision.trail[:MAX_LAYERS]
    ]
