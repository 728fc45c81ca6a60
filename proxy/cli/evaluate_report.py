"""What ``weir evaluate`` says of a run: a table for people, plain data for programs, and what is below a gate."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from policies.fidelity import PROMPTS, Coverage, Dimension, Fidelity, Share, Verdict
from proxy.effects.allowance import Spent
from proxy.evaluation import facts_of
from proxy.rehearsal.judging import Evaluated

TOO_AGGRESSIVE = 0.75
"""Fidelity under which a compaction takes too much (requirement A0.122)."""
COLUMNS = (
    "conversation", "request", "before", "after", "ratio", "coverage", "recoverable",
    "fidelity", "key facts", "state", "decisions", "yes/no/unknown",
)  # fmt: skip
MISSING_SHOWN = 8


@dataclass(slots=True)
class Report:
    """A run: who was asked, every compaction with its scores, and what the models took."""

    model: str
    judge: str
    policy: str
    done: list[tuple[str, Evaluated]] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, evaluated: Evaluated) -> None:
        """Add one compaction of the conversation of that name."""
        self.done.append((name, evaluated))

    @property
    def names(self) -> list[str]:
        """The conversations, each once."""
        return list(dict.fromkeys(name for name, _ in self.done))

    @property
    def fidelity(self) -> Fidelity:
        """All verdicts."""
        return sum((each.fidelity for _, each in self.done), Fidelity())

    @property
    def coverage(self) -> Coverage:
        """All of what was wanted."""
        result = Coverage()
        for _, each in self.done:
            result = result + each.coverage
        return result

    @property
    def ratio(self) -> float | None:
        """Tokens of all contexts before over those after."""
        before = sum(each.compaction.contexts.tokens_before for _, each in self.done)
        after = sum(each.compaction.contexts.tokens_after for _, each in self.done)
        return before / after if before and after else None


def judged_below(report: Report, *, gate: float | None, gate_coverage: float | None) -> list[str]:
    """What is below its gate; a score that is null is: what was not measured passes nothing."""
    found = []
    for name, score, least in (
        ("fidelity", report.fidelity.score(), gate),
        ("coverage", report.coverage.score, gate_coverage),
    ):
        if least is None:
            continue
        if score is None:
            found.append(f"{name} was not measured, and the gate is {least:g}")
        elif score < least:
            found.append(f"{name} {score:.3f} is below the gate of {least:g}")
    return found


def report_table(report: Report) -> Table:
    """One row for each compaction and one for all."""
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, each in report.done:
        contexts = each.compaction.contexts
        request = str(each.compaction.request) if each.compaction.request else "archive"
        sizes = (f"{contexts.tokens_before:,}", f"{contexts.tokens_after:,}", _times(contexts.ratio))
        table.add_row(name, request, *sizes, *_scores(each.coverage, each.fidelity))
    sums = [sum(size) for size in zip(*(_sizes(each) for _, each in report.done), strict=True)] or [0, 0]
    whole = (f"{sums[0]:,}", f"{sums[1]:,}", _times(report.ratio))
    table.add_row("all", str(len(report.done)), *whole, *_scores(report.coverage, report.fidelity))
    return table


def _sizes(each: Evaluated) -> tuple[int, int]:
    return each.compaction.contexts.tokens_before, each.compaction.contexts.tokens_after


def _scores(coverage: Coverage, fidelity: Fidelity) -> tuple[str, ...]:
    counts = "/".join(str(fidelity.count(verdict)) for verdict in (Verdict.YES, Verdict.NO, Verdict.UNKNOWN))
    return (
        _percent(coverage.score),
        _percent(coverage.whole.recoverable),
        _percent(fidelity.score()),
        *(_percent(fidelity.score(dimension)) for dimension in Dimension),
        counts if fidelity.judged else "null",
    )


def _percent(value: float | None) -> str:
    return "null" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "null" if value is None else f"{value:.2f}x"


def report_lines(report: Report, *, answers: bool) -> Iterator[str]:
    """What is worth saying beside the table."""
    coverage, fidelity, score = report.coverage, report.fidelity, report.fidelity.score()
    if not report.done:
        yield "Nothing was compacted, so nothing was measured."
        return
    kinds = (("facts", coverage.facts), ("identifiers", coverage.identifiers), ("rules", coverage.rules))
    yield "Kept: " + ", ".join(f"{share.kept} of {share.wanted} {name}" for name, share in kinds) + "."
    if coverage.missing:
        yield f"Not kept, but archived or gone: {'; '.join(coverage.missing[:MISSING_SHOWN])}"
    if score is not None and score < TOO_AGGRESSIVE:
        yield f"Fidelity under {TOO_AGGRESSIVE} says that too much is taken: raise low_water, tail or extract."
    if report.model:
        said = report.spent
        asked = f"{said.calls} calls, {said.asked:,} tokens asked, {said.answered:,} answered"
        yield f"{report.model} answered and {report.judge} judged: {asked}."
    if reasons := {**fidelity.unknown, **{f"call: {k}": v for k, v in report.failures.items()}}:
        yield "Not decided: " + ", ".join(f"{count} {why}" for why, count in reasons.items()) + "."
    if answers:
        yield from _answers(report.done)


def _answers(done: Sequence[tuple[str, Evaluated]]) -> Iterator[str]:
    for name, each in done:
        for judged in each.fidelity.judged:
            yield f"\n{name}, request {each.compaction.request}: {judged.question.text}"
            yield f"  whole:     {' '.join(judged.original.split())}"
            yield f"  compacted: {' '.join(judged.compacted.split())}"
            yield f"  verdict:   {judged.verdict}{f' ({judged.why})' if judged.why else ''}"


def report_json(report: Report, *, answers: bool, failures: Sequence[str]) -> dict[str, object]:
    """The run as plain data; every score is null where nothing was judged, or nothing wanted."""
    return {
        "policy": report.policy,
        "model": report.model or None,
        "judge": report.judge or None,
        "prompts": {prompt.purpose: prompt.digest for prompt in PROMPTS.values()},
        "conversations": len(report.names),
        "compactions": [_entry(name, each, answers=answers) for name, each in report.done],
        "total": facts_of(report.fidelity, report.coverage, report.ratio) | _shares(report.coverage),
        "missing": list(report.coverage.missing),
        "spent": asdict(report.spent),
        "failures": report.failures,
        "passed": not failures,
        "below": list(failures),
    }


def _entry(name: str, each: Evaluated, *, answers: bool) -> dict[str, object]:
    contexts = each.compaction.contexts
    entry: dict[str, object] = {
        "conversation": name,
        "request": each.compaction.request or None,
        "layers": list(each.compaction.layers),
        "tokens_before": contexts.tokens_before,
        "tokens_after": contexts.tokens_after,
        **facts_of(each.fidelity, each.coverage, contexts.ratio),
        **_shares(each.coverage),
    }
    if answers:
        entry["answers"] = [
            {
                "question": j.question.text,
                "dimension": j.question.dimension.value,
                "origin": j.question.origin,
                "original": j.original,
                "compacted": j.compacted,
                "verdict": j.verdict.value,
                "why": j.why or None,
            }
            for j in each.fidelity.judged
        ]
    return entry


def _shares(coverage: Coverage) -> dict[str, object]:
    return {
        name: _share(share)
        for name, share in (("facts", coverage.facts), ("identifiers", coverage.identifiers), ("rules", coverage.rules))
    }


def _share(share: Share) -> dict[str, object]:
    return {"wanted": share.wanted, "kept": share.kept, "share": share.value, "recoverable": share.recoverable}
