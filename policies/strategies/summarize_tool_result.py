"""Old tool results become their finding: what a model writes, or the telling lines where there is none.

The largest saving goes first, and only as much as the layer's target takes. A sub-agent's report above its cap is read
for its task instead, whatever its size, also where it was cut to the cap before. The full text is archived; the same
result is asked about once, because the question's address is its content.
"""

from collections.abc import Iterator, Mapping

from policies.bounds import Bounds
from policies.condensing import Job, condense_each, is_original, may_ask, reading_of
from policies.draft import Draft
from policies.effects import Flow
from policies.ledger import EditKind
from policies.messages import ToolCall
from policies.pieces import Piece
from policies.scoring.blocks import step_numbers
from policies.summary import Line
from policies.text.gist import gist

OVER = 500
RATIO = 0.20
LEAST = 32
"""Tokens of a finding's text at the least."""


def summarize_tool_result(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft with results of more than ``over`` tokens in about ``ratio`` of them, until it is at its target.

    Params: ``over`` (tokens of the result's text), ``ratio``, and ``keep_newest``, the number of newest steps whose
    results stay. Without a model a result becomes its telling lines if these take no more than that and every line
    that reports an error is among them; otherwise it stays.
    """
    calls = bounds.calls()
    reports = {*bounds.settings.ingest.sub_agent_tools} if may_ask(bounds) else set[str]()
    jobs = [*_jobs(draft, bounds, calls, reports)]

    def plain(job: Job) -> str:
        call = calls.get(job.index)
        return gist(
            draft.transcript.read(job.index).text,
            known=f"{call.name} {call.arguments}" if call else "",
            max_tokens=job.allowed,
            counter=bounds.counter,
            whole=True,
        )

    return (yield from condense_each(draft, bounds, jobs, plain=plain))


def _jobs(draft: Draft, bounds: Bounds, calls: Mapping[int, ToolCall], reports: set[str]) -> Iterator[Job]:
    """What may be summarised: reports of sub-agents first, then what saves most, of equals the oldest."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    steps, newest = step_numbers(messages), bounds.layer.whole("keep_newest", 0)
    found: list[tuple[bool, int, Job]] = []
    for piece in draft.pieces:
        index = piece.index
        if index is None or index in guarded or not messages[index].is_result or messages[index].media:
            continue
        if not is_original(piece) or not bounds.in_scope(draft, piece) or steps[-1] - steps[index] < newest:
            continue
        call = calls.get(index)
        report = call is not None and call.name in reports
        job = _report(draft, bounds, piece, index, calls) if report else _finding(draft, bounds, piece, index, call)
        if job is not None:
            found.append((report, piece.tokens - job.allowed, job))
    found.sort(key=lambda f: (not f[0], -f[1], f[2].index))
    return (job for _, _, job in found)


def _finding(draft: Draft, bounds: Bounds, piece: Piece, index: int, call: ToolCall | None) -> Job | None:
    over, ratio = bounds.layer.whole("over", OVER), bounds.layer.params.get("ratio", RATIO)
    if piece.tokens <= over:
        return None
    message = draft.transcript.messages[index]
    text = draft.transcript.read(index).text
    if bounds.counter.count(text if piece.text is None else piece.text) <= over:
        return None
    share = float(ratio) if isinstance(ratio, int | float) else RATIO
    tail = f"[weir: summary of {message.tokens:,} tokens, archived as {message.ref}]"
    return Job(
        index=index,
        kind=EditKind.SUMMARY,
        allowed=max(LEAST, int(share * piece.tokens) - bounds.counter.count(tail)),
        tail=tail,
        key=message.digest.hex(),
        prompt="tool_result",
        lines=(Line(f"result of {call.name}" if call else "tool result", text),),
    )


def _report(draft: Draft, bounds: Bounds, piece: Piece, index: int, calls: Mapping[int, ToolCall]) -> Job | None:
    cap, message = bounds.settings.ingest.sub_agent_cap, draft.transcript.messages[index]
    if message.tokens <= cap:
        return _finding(draft, bounds, piece, index, calls.get(index))
    return reading_of(bounds, index, calls.get(index), kind=EditKind.SUMMARY, most=min(cap, int(piece.tokens * 0.9)))
