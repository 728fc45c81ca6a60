"""The one table of the management API: what is routed, who may ask, and what the OpenAPI document says of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from policies.quality.health import KEPT
from proxy.http import alerts, archive, audit, checkpoints, control, conversations, policies, usage
from proxy.http.request import MAX_ROWS, ManagementAnswer, ManagementRequest
from proxy.http.shape import Page

PREFIX = "/weir/"
Asker = Literal["anyone", "key", "caller", "operator"]
Handler = Callable[[ManagementRequest], Awaitable[ManagementAnswer | msgspec.Struct]]


@dataclass(frozen=True, slots=True)
class ManagementRoute:
    """One route below ``/weir/``.

    Attributes:
        pattern: its path; parts in braces are any.
        handler: what answers it, its docstring the text of the document; None for the OpenAPI document itself.
        gives: the shape of its JSON, of ``statuses`` below 300; for another ``kind`` there is none.
        query: its parameters.
        takes: the shape of the body, None where there is none; ``yaml`` for a policy.
        rows: how many rows a list gives where no limit is asked for, ``most`` how many at most.
        asker: who may ask: ``anyone``, whoever has a ``key``, the ``caller`` with its own key, the ``operator``.
    """

    method: str
    pattern: str
    handler: Handler | None
    gives: object = None
    query: tuple[str, ...] = ()
    takes: object = None
    statuses: tuple[int, ...] = (200,)
    kind: Literal["json", "markdown", "pages", "text"] = "json"
    rows: int = 200
    most: int = MAX_ROWS
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


_LIST = ("limit", "cursor")
_ONE = "conversations/{id}"
_VERSION = f"{_ONE}/checkpoints/{{version}}"
_POLICY = "policies/{name}"
_R = ManagementRoute

ROUTES = (
    _R("GET", "conversations", conversations.listing, Page[conversations.Conversation], ("closed", *_LIST), rows=50),
    _R("GET", _ONE, conversations.one, conversations.ConversationStatus),
    _R("DELETE", _ONE, control.delete, control.Deleted),
    _R("GET", f"{_ONE}/timeline", conversations.timeline, Page[conversations.Exchange], ("since", *_LIST)),
    _R("GET", f"{_ONE}/checkpoint", checkpoints.checkpoint, checkpoints.Saved),
    _R("GET", f"{_ONE}/checkpoint.md", checkpoints.checkpoint_markdown, kind="markdown"),
    _R("GET", f"{_ONE}/checkpoints", checkpoints.checkpoints, Page[checkpoints.Version], _LIST),
    _R("GET", _VERSION, checkpoints.checkpoint_version, checkpoints.SavedVersion),
    _R("GET", f"{_VERSION}/source", checkpoints.source, query=("cursor",), kind="pages", asker="caller"),
    _R("GET", f"{_ONE}/removed", archive.removed, Page[archive.Removed], _LIST),
    _R("GET", f"{_ONE}/audit", audit.conversation_audit, audit.ConversationAudit, _LIST),
    _R("GET", f"{_ONE}/health", alerts.health_of, alerts.ConversationHealth, ("limit",), rows=KEPT, most=KEPT),
    _R("GET", f"{_ONE}/notes", control.notes, Page[control.KeptNote], _LIST, rows=MAX_ROWS),
    _R("POST", f"{_ONE}/notes", control.add_note, control.KeptNote, takes=control.NewNote, statuses=(201, 200)),
    _R("POST", f"{_ONE}/compact", control.compact, control.Wanted, statuses=(202,)),
    _R("POST", f"{_ONE}/rollback/{{version}}", checkpoints.rollback, checkpoints.RolledBack),
    _R("POST", f"{_ONE}/pin", archive.pin, archive.Pinned, takes=archive.Pin),
    _R("POST", f"{_ONE}/close", control.close, control.Closed),
    _R("GET", "blobs/{ref}", archive.blob, query=("cursor",), kind="text", asker="caller"),
    _R("GET", "search", archive.search, Page[archive.Found], ("q", "conversation", *_LIST), rows=20, asker="caller"),
    _R("GET", "health", alerts.health, alerts.OpenAlerts, _LIST),
    _R("GET", "usage", usage.usage, usage.Usage, ("since", "by", *_LIST)),
    _R("GET", "audit", audit.audit, Page[audit.Audited], ("type", *_LIST)),
    _R("GET", "policies", policies.listing, Page[policies.Policy], _LIST),
    _R("GET", _POLICY, policies.one, policies.WholePolicy),
    _R("PUT", _POLICY, policies.put, policies.WholePolicy, takes="yaml", statuses=(200, 201), asker="operator"),
    _R("DELETE", _POLICY, policies.delete, policies.DeletedPolicy, asker="operator"),
    _R("GET", "config", policies.config, policies.Configuration, asker="operator"),
    _R("GET", "openapi.json", None, dict, asker="anyone"),
)
"""Every route there is; the first that matches answers."""
