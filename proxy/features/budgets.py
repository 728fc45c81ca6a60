"""Budgets of keys and teams: what is used of each, and the alerts where one is used up."""

from collections.abc import Mapping

from policies.health import HealthAlert, Level
from proxy.access.budgets import BudgetNotice, BudgetUse, said_amount
from proxy.features.alerts import Notice
from proxy.http.request import (
    DOLLAR_DIGITS,
    MAX_ROWS,
    Json,
    ManagementRequest,
    page_of_whole,
)
from proxy.http.routes import PAGED, ManagementRoute


async def list_budgets(request: ManagementRequest) -> Json:
    """What is used of each budget in its present period, and what requests in flight have reserved.

    The operator sees those of all teams and keys, a caller its own and its team's.
    """
    wanted = (request.limit(), request.after(str, str, str, str))
    runtime = request.runtime
    caller = request.caller
    if request.tenant is None:
        uses = await runtime.budgets.look_up(runtime.keyring.callers, runtime.config.teams)
    else:
        own = [] if caller is None else [caller]
        teams = {each.team: each.team_rules for each in own if each.team_rules is not None}
        uses = await runtime.budgets.look_up(own, teams)
    return page_of_whole(uses, wanted, budget_of, lambda use: use.labels)


def budget_of(use: BudgetUse) -> Json:
    """One budget in one unit, tokens or US dollars."""
    digits = 0 if use.unit == "tokens" else DOLLAR_DIGITS
    return {
        "of": use.scope,
        "name": use.label,
        "period": use.period,
        "unit": use.unit,
        "limit": round(use.limit, digits),
        "used": round(use.used, digits),
        "reserved": round(use.reserved, digits),
        "resets": use.resets,
        "hard": use.hard,
    }


BUDGET_ALERTS: Mapping[str, Level] = {
    "budget_nearly_used": "warning",
    "budget_used_up": "warning",
    "budget_refuses": "critical",
}
"""The alerts about budgets with their levels: 80 % is used, all of a soft one is, all of a hard one
is.
"""


def notice_of_budget(notice: BudgetNotice) -> Notice:
    """The alert for a budget that is used up, or nearly."""
    use = notice.use
    limit = said_amount(use.unit, use.limit)
    used = said_amount(use.unit, use.used)
    if notice.share < 1:
        kind = "budget_nearly_used"
        said = "is nearly used up"
    elif use.hard:
        kind = "budget_refuses"
        said = "is used up, and requests are refused until it resets"
    else:
        kind = "budget_used_up"
        said = "is used up, and requests go on"
    text = f"The budget of the {use.scope} {use.label}, {limit} a {use.period}, {said} ({used})."
    return Notice(
        alert=HealthAlert(
            kind=kind,
            level=BUDGET_ALERTS[kind],
            category="notice",
            at=notice.at,
            value=use.used,
            limit=notice.share * use.limit,
            said=text,
        ),
        tenant=notice.tenant,
        conversation="",
        policy="",
        request=notice.request,
        about=f"_{use.scope}_{use.period}_{use.unit}",
    )


ROUTES = (ManagementRoute("GET", "budgets", list_budgets, PAGED, rows=MAX_ROWS),)
