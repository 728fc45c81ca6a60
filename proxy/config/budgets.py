"""Budgets of keys and teams: what may be used in a day, a week or a month (UTC)."""

import datetime as dt
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

Period = Literal["day", "week", "month"]
Unit = Literal["tokens", "dollars"]
PERIODS: tuple[Period, ...] = get_args(Period)
UNITS: tuple[Unit, ...] = get_args(Unit)
EXAMPLES = "day,tokens=1000000 or month,dollars=50,soft"
HARDNESS = {"hard": True, "soft": False}
Rate = Annotated[int, Field(gt=0)]
Amount = Annotated[int, Field(gt=0, le=10**15)]
Dollars = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be used in each ``period``: ``tokens`` of prompts and answers, US ``dollars``.

    A ``hard`` one refuses requests beyond it; others only report it.
    """

    period: Period
    tokens: Amount | None = None
    dollars: Dollars | None = None
    hard: bool = True

    def __post_init__(self) -> None:
        if self.tokens is None and self.dollars is None:
            raise ValueError("should have tokens, dollars or both")

    def limit(self, unit: Unit) -> float | None:
        """The most of a unit, None where the budget has none."""
        return self.tokens if unit == "tokens" else self.dollars

    def __str__(self) -> str:
        """As :func:`budget_in` reads it."""
        sums = [f"{unit}={self.limit(unit):.15g}" for unit in UNITS if self.limit(unit) is not None]
        return ",".join([self.period, *sums, *([] if self.hard else ["soft"])])


def _each_once(budgets: tuple[Budget, ...]) -> tuple[Budget, ...]:
    if (what := repeated(budgets)) is not None:
        raise ValueError(f"should have one budget for the {what}, not two")
    return budgets


Budgets = Annotated[tuple[Budget, ...], AfterValidator(_each_once)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSettings:
    """What all keys of a team may use together; None for any number."""

    budgets: Budgets = ()
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None


def budget_in(text: str) -> Budget:
    """The budget that a text like ``day,tokens=1000000`` or ``month,dollars=50,soft`` says.

    Raises ValueError that says what to write.
    """
    period, *parts = (part.strip() for part in text.split(","))
    given: dict[str, object] = {"period": period}
    for part in parts:
        name, equals, value = part.partition("=")
        if part in HARDNESS:
            name = "hard"
        if name in given:
            raise ValueError(f"has {name} twice; a budget is written {EXAMPLES}")
        if part in HARDNESS:
            given["hard"] = HARDNESS[part]
        elif equals and name in UNITS:
            given[name] = value
        else:
            raise ValueError(f"has {part[:40]!r}; a budget is written {EXAMPLES}")
    return budget_from(given)


def budget_from(given: object) -> Budget:
    """The budget of a mapping with the keys of YAML, or of a text. Raises ValueError."""
    if isinstance(given, str):
        return budget_in(given)
    if not isinstance(given, Mapping):
        raise ValueError(  # noqa: TRY004 - input
            f"should be a text or a mapping; a budget is written {EXAMPLES}"
        )
    if unknown := [n for n in given if n not in FIELDS]:
        raise ValueError(f"has {str(unknown[0])[:40]!r}; a budget has {', '.join(FIELDS)}")
    try:
        return _BUDGET.validate_python(given)
    except ValidationError as fault:
        error = fault.errors(include_url=False, include_input=False)[0]
        said = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
        where = f"{error['loc'][0]} " if error["loc"] else ""
        raise ValueError(f"{where}{said}; a budget is written {EXAMPLES}") from None


FIELDS = tuple(Budget.__dataclass_fields__)
_BUDGET = TypeAdapter(Budget)


def budgets_from(given: object) -> tuple[Budget, ...]:
    """The budgets of a list of mappings or texts. Raises ValueError, which says what to write."""
    if not isinstance(given, list | tuple):
        raise ValueError(f"should be a list; a budget is written {EXAMPLES}")  # noqa: TRY004 - input
    return _each_once(tuple(map(budget_from, given)))


def repeated(budgets: Iterable[Budget]) -> str | None:
    """What two of the budgets limit, None where each limits something else."""
    seen: set[tuple[str, str]] = set()
    for budget in budgets:
        for unit in UNITS:
            if budget.limit(unit) is None:
                continue
            if (budget.period, unit) in seen:
                return f"{unit} of a {budget.period}"
            seen.add((budget.period, unit))
    return None


def period_at(period: Period, at: float) -> tuple[float, float]:
    """When the period of a moment begins and ends, seconds since 1970."""
    day = dt.datetime.fromtimestamp(at, tz=dt.UTC).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    if period == "day":
        begins = day
        ends = day + dt.timedelta(days=1)
    elif period == "week":
        begins = day - dt.timedelta(days=day.weekday())
        ends = begins + dt.timedelta(days=7)
    else:
        begins = day.replace(day=1)
        ends = (begins + dt.timedelta(days=31)).replace(day=1)
    return begins.timestamp(), ends.timestamp()


def seconds_left(period: Period, at: float) -> int:
    """Whole seconds until the period of a moment ends, 1 at least."""
    return max(1, math.ceil(period_at(period, at)[1] - at))
