"""The one table of the management API: what is routed, who may ask, and what the OpenAPI document says of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from policies.health import KEPT
from proxy.routes import alerts, blobs, control, conversations, operator, policies, usage
from proxy.routes import shapes as s
from proxy.routes import shapes_events as se
from proxy.routes import shapes_operator as so
from proxy.routes.question import MOST_ROWS, Answer, Question

PREFIX = "/weir/"
Asker = Literal["anyone", "key", "caller", "operator"]
Kind = Literal["json", "markdown", "pages", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementRoute:
    """One route below ``/weir/``.

    Attributes:
        pattern: its path; parts in braces are any.
        answer: what answers it, None for the OpenAPI document.
        gives: the shape of its JSON, of ``statuses`` below 300; for another ``kind`` there is none.
        query: its parameters.
        takes: the shape of the body, None where there is none; ``yaml`` for a policy.
        rows: how many rows a list gives where no limit is asked for, ``most`` how many at most.
        asker: who may ask: ``anyone``, whoever has a ``key``, the ``caller`` with its own key, the ``operator``.
    """

    method: str
    pattern: str
    answer: Callable[[Question], Awaitable[Answer]] | None
    gives: object = None
    query: tuple[str, ...] = ()
    takes: object = None
    statuses: tuple[int, ...] = (200,)
    kind: Kind = "json"
    rows: int = MOST_ROWS
    most: int = MOST_ROWS
    asker: Asker = "key"

    def match(self, path: tuple[str, ...]) -> dict[str, str] | None:
        """The named parts of a path, None where the pattern is another one."""
        parts = self.pattern.split("/")
        if len(parts) != len(path):
            return None
        found = {}
        for part, given in zip(parts, path, strict=True):
            if part.startswith("{"):
                found[part.strip("{}")] = given
            elif part != given:
                return None
        return found


def _get(
    pattern: str,
    answer: Callable[[Question], Awaitable[Answer]],
    gives: object = None,
    *query: str,
    kind: Kind = "json",
    asker: Asker = "key",
) -> ManagementRoute:
    return ManagementRoute(
        method="GET", pattern=pattern, answer=answer, gives=gives, query=query, kind=kind, asker=asker
    )


def _list(
    pattern: str,
    answer: Callable[[Question], Awaitable[Answer]],
    gives: object,
    *query: str,
    rows: int = 200,
    most: int = MOST_ROWS,
    asker: Asker = "key",
) -> ManagementRoute:
    return ManagementRoute(
        method="GET",
        pattern=pattern,
        answer=answer,
        gives=gives,
        query=(*query, "limit", "cursor"),
        rows=rows,
        most=most,
        asker=asker,
    )


def _post(
    pattern: str,
    answer: Callable[[Question], Awaitable[Answer]],
    gives: object,
    takes: object = None,
    statuses: tuple[int, ...] = (200,),
) -> ManagementRoute:
    return ManagementRoute(method="POST", pattern=pattern, answer=answer, gives=gives, takes=takes, statuses=statuses)


ONE = "conversations/{id}"
VERSION = f"{ONE}/checkpoints/{{version}}"
POLICY = "policies/{name}"
ROUTES = (
    _list("conversations", conversations.listing, s.Page[s.Conversation], "closed", rows=50),
    _get(ONE, conversations.one, s.ConversationStatus),
    ManagementRoute(method="DELETE", pattern=ONE, answer=control.delete, gives=se.Deleted),
    _list(f"{ONE}/timeline", conversations.timeline, s.Page[s.Exchange], "since"),
    _get(f"{ONE}/checkpoint", conversations.checkpoint, s.Saved),
    _get(f"{ONE}/checkpoint.md", conversations.checkpoint_markdown, kind="markdown"),
    _list(f"{ONE}/checkpoints", conversations.checkpoints, s.Page[s.Version]),
    _get(VERSION, conversations.checkpoint_version, s.SavedVersion),
    _get(f"{VERSION}/source", conversations.source, None, "cursor", kind="pages", asker="caller"),
    _list(f"{ONE}/removed", conversations.removed, s.Page[s.Removed]),
    _list(f"{ONE}/audit", conversations.audit, se.ConversationAudit),
    ManagementRoute(
        method="GET",
        pattern=f"{ONE}/health",
        answer=alerts.health_of,
        gives=se.ConversationHealth,
        query=("limit",),
        rows=KEPT,
        most=KEPT,
    ),
    _list(f"{ONE}/notes", conversations.notes, s.Page[se.KeptNote], rows=500),
    _post(f"{ONE}/notes", control.add_note, se.KeptNote, se.NewNote, (201, 200)),
    _post(f"{ONE}/compact", control.compact, se.Wanted, statuses=(202,)),
    _post(f"{ONE}/rollback/{{version}}", control.rollback, se.RolledBack),
    _post(f"{ONE}/pin", control.pin, se.Pinned, se.Pin),
    _post(f"{ONE}/close", control.close, se.Closed),
    _get("blobs/{ref}", blobs.blob, None, "cursor", kind="text", asker="caller"),
    _list("search", conversations.search, s.Page[se.Found], "q", "conversation", rows=20, asker="caller"),
    _list("health", alerts.health, se.OpenAlerts),
    _list("usage", usage.usage, so.Usage, "since", "by"),
    _list("audit", operator.audit, s.Page[se.Audited], "type"),
    _list("policies", policies.listing, s.Page[so.Policy]),
    _get(POLICY, policies.one, so.WholePolicy),
    ManagementRoute(
        method="PUT",
        pattern=POLICY,
        answer=policies.put,
        gives=so.WholePolicy,
        takes="yaml",
        statuses=(200, 201),
        asker="operator",
    ),
    ManagementRoute(method="DELETE", pattern=POLICY, answer=policies.delete, gives=so.DeletedPolicy, asker="operator"),
    _get("config", operator.config, so.Configuration, asker="operator"),
    ManagementRoute(method="GET", pattern="openapi.json", answer=None, gives=dict, asker="anyone"),
)
"""Every route there is; the first that matches answers."""
