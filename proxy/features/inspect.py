"""One request looked at from both sides: what the client sent, and what the model saw.

A side is a list of rows, whatever the client's API calls its items: a message of a chat is one, and
an item or a block of another API can be one.
"""

from itertools import groupby
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from policies.ledger import EditKind
from proxy.errors import NotFound
from proxy.features.removed import BLOBS, WHY, text_of
from proxy.http.request import Json, ManagementRequest, exchange_of
from proxy.http.routes import CONVERSATION, ManagementRoute
from proxy.store.inspections import Inspected

MAX_ID_LEN = 100
SUMMARY = "a summary of what was removed before it"
RECALLED = "removed earlier and asked for by the newest user message"
SUMMARISED = "a summary of the older history has its place"
DROPPED = "it was dropped"
Status = Literal["same", "changed", "removed", "added"]


class SideRow(msgspec.Struct):
    """One item of a side; text is not there for the operator, None where it was not kept.

    place: its line; what stands beside it on the other side has the same.
    """

    place: int
    role: str
    kind: str
    tokens: int
    status: Status
    reason: str | None
    ref: str | None
    link: str | None
    text: str | UnsetType | None = UNSET


class Pair(msgspec.Struct, frozen=True):
    client: SideRow | None
    model: SideRow | None

    @property
    def status(self) -> Status:
        row = self.client or self.model
        assert row is not None  # noqa: S101 - a line has at least one side
        return row.status


async def both_sides(request: ManagementRequest) -> Json:
    """One request: what the client sent, and what the model saw, item by item.

    The newest requests of a conversation are kept so (the policy's ``inspect``). Items that stand
    beside one another have the same ``place``. What they say is given to the caller alone.
    """
    row = await request.conversation()
    request_id = request.path["rid"]
    if len(request_id) > MAX_ID_LEN or not request_id.isprintable():
        raise NotFound("There is no such request.")
    try:
        exchange_row, found = await request.store.inspection(row, request_id)
    except KeyError:
        raise NotFound(f"The conversation has no request {request_id[:80]!r}.") from None
    exchange = exchange_of(exchange_row)
    template = request.runtime.config.telemetry.trace_url
    trace = exchange["detail"].get("trace")
    link = template.replace("{trace_id}", str(trace)) if template and trace else None
    client: list[SideRow] = []
    model: list[SideRow] = []
    if found is not None:
        client, model = _sides(found, with_text=request.tenant is not None)
    return {
        "exchange": exchange,
        "kept": found is not None,
        "tools": 0 if found is None else found.tools,
        "pruned": [] if found is None else list(found.pruned),
        "trace": link,
        "client": client,
        "model": model,
    }


def runs(both: Json) -> list[tuple[Status, list[Pair]]]:
    client, model = ({row.place: row for row in side} for side in (both["client"], both["model"]))
    pairs = [Pair(client.get(n), model.get(n)) for n in sorted(client.keys() | model.keys())]
    return [(status, list(lines)) for status, lines in groupby(pairs, key=lambda pair: pair.status)]


def _sides(found: Inspected, *, with_text: bool) -> tuple[list[SideRow], list[SideRow]]:
    client: list[SideRow] = []
    model: list[SideRow] = []
    place = done = 0

    def sent(index: int, status: Status, reason: str | None) -> SideRow:
        ref, role, tokens = found.client[index]
        link = BLOBS + ref if ref in found.archived else None
        text = _message(found.bodies.get(ref)) if with_text else UNSET
        return SideRow(place, role, "message", tokens, status, reason, ref, link, text)

    forwarded = (
        found.sent
        if found.sent is not None
        else [(n, None, row[2], None) for n, row in enumerate(found.client)]
    )
    indices = [index for index, *_ in forwarded]
    for n, (index, kind, tokens, ref) in enumerate(forwarded):
        following = next((each for each in indices[n:] if each is not None), len(found.client))
        gone = following if index is None or index >= done else done
        is_summary = index is None and kind != EditKind.RECALL
        while done < gone:  # what is missing precedes what replaced it
            client.append(sent(done, "removed", SUMMARISED if is_summary else DROPPED))
            place = place + 1
            done = done + 1
        text = _text(found, ref) if with_text else UNSET
        if index is None:
            of = "recall" if kind == EditKind.RECALL else "summary"
            reason = RECALLED if of == "recall" else SUMMARY
            model.append(SideRow(place, "user", of, tokens, "added", reason, None, None, text))
        elif ref is None and kind is None:
            client.append(sent(index, "same", None))
            model.append(client[-1])
            done = index + 1
        else:
            client.append(sent(index, "changed", WHY.get(kind or "", "the policy changed it")))
            after = text if ref is not None and kind not in _KEEPING else client[-1].text
            row = client[-1]
            model.append(
                SideRow(
                    place,
                    row.role,
                    "message",
                    tokens,
                    "changed",
                    row.reason,
                    row.ref,
                    row.link,
                    after,
                )
            )
            done = index + 1
        place += 1
    for index in range(done, len(found.client)):
        client.append(sent(index, "removed", DROPPED))
        place += 1
    return client, model


_KEEPING = frozenset({str(EditKind.REASONING), str(EditKind.UNBOUND), str(EditKind.MEDIA)})
"""Edits whose text is not the whole of what the message says then."""


def _text(found: Inspected, ref: str | None) -> str | None:
    body = None if ref is None else found.bodies.get(ref)
    return None if body is None else body.decode("utf-8", "replace")


def _message(raw: bytes | None) -> str | None:
    return None if raw is None else text_of(raw)


ROUTES = (ManagementRoute("GET", f"{CONVERSATION}/requests/{{rid}}", both_sides),)
