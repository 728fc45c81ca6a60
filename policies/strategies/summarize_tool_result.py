"""``summarize_tool_result``: old results become their finding."""

from dataclasses import dataclass, replace
from functools import partial

from policies.draft import Bounds, Draft, Strategy, is_original, number, results, whole
from policies.effects import Flow
from policies.ledger import EditKind, PlannedMessage
from policies.messages import ToolCall, step_numbers
from policies.strategies.rewrite import (
    RewriteTask,
    call_in_words,
    condense_each,
    may_ask,
    reading_of,
    result_origin,
)
from policies.summary.material import MaterialLine
from policies.text.gist import gist

MIN_FINDING = 32
"""Minimum tokens of a finding's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizeToolResult(Strategy):
    """Results over ``over`` tokens become about ``ratio`` of themselves: a model's words, or the
    most informative lines.

    The largest saving goes first. A sub-agent's report above its cap is read for its task instead,
    whatever its size.
    """

    name = "summarize_tool_result"
    asks_model = costs = True
    over: int = whole(500)
    ratio: float = number(0.20, most=1)
    keep_newest: int = whole(0)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        return condense_each(draft, bounds, self._jobs(draft, bounds))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        ingest = bounds.settings.ingest
        calls = bounds.transcript.calls
        steps = step_numbers(draft.transcript.messages)
        reports = ingest.sub_agents if may_ask(bounds) else {}
        found: list[tuple[bool, int, RewriteTask]] = []
        for index, piece, message in results(draft, bounds):
            if not is_original(piece) or steps[-1] - steps[index] < self.keep_newest:
                continue
            call = calls.get(index)
            text = draft.transcript.read(index).text
            report = call is not None and call.name in reports
            if call is not None and message.tokens > reports.get(call.name, message.tokens):
                most = min(reports[call.name], int(piece.tokens * 0.9))
                job: RewriteTask | None = reading_of(
                    bounds, index, call, kind=EditKind.SUMMARY, most=most
                )
            else:
                job = self._finding(bounds, piece, index, call)
            if job is not None:
                plain = partial(
                    gist,
                    known=call_in_words(call),
                    max_tokens=job.allowed,
                    counter=bounds.counter,
                    whole=True,
                )
                found.append(
                    (report, piece.tokens - job.allowed, replace(job, plain=partial(plain, text)))
                )
        found.sort(key=lambda f: (not f[0], -f[1], f[2].index))
        return [job for _, _, job in found]

    def _finding(
        self, bounds: Bounds, piece: PlannedMessage, index: int, call: ToolCall | None
    ) -> RewriteTask | None:
        message = bounds.transcript.messages[index]
        text = bounds.transcript.read(index).text
        count = bounds.counter.count
        if (
            piece.tokens <= self.over
            or count(text if piece.text is None else piece.text) <= self.over
        ):
            return None
        tail = f"[weir: summary of {message.tokens:,} tokens, archived as {message.ref}]"
        return RewriteTask(
            index=index,
            kind=EditKind.SUMMARY,
            allowed=max(MIN_FINDING, int(self.ratio * piece.tokens) - count(tail)),
            tail=tail,
            key=message.digest.hex(),
            prompt="tool_result",
            lines=(MaterialLine(result_origin(call), text),),
        )
