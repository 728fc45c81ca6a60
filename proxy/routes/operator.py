"""What the management API tells beside conversations: the audit of them all, the configuration, and this API itself."""

from proxy.config import public
from proxy.config_file import dotted
from proxy.routes.pages import listed, place_in
from proxy.routes.question import Answer, Question, as_json
from proxy.routes.rows import audit_json
from proxy.store import AuditRow
from proxy.store.chain import AuditType

PUBLISHED_ELSEWHERE = frozenset({"policies", "warnings"})


async def audit(question: Question) -> Answer:
    """The rows of the caller's audit, newest first, those of deleted conversations included; for the operator of all.

    ``type`` leaves one kind of row.
    """
    limit, kind = question.limit(), question.word("type", tuple(map(str, AuditType)))
    if question.tenant is None:
        after = place_in(question.query.get("cursor"), float, str, int)
    else:
        after = place_in(question.query.get("cursor"), int)
    rows = await question.store.audit(question.tenant, kind=kind, limit=limit + 1, after=after)

    def place(row: AuditRow) -> tuple[float | str | int, ...]:
        return (row.at, row.tenant, row.seq) if question.tenant is None else (row.seq,)

    return listed(rows, limit, audit_json, place)


async def config(question: Question) -> Answer:
    """Every value of the configuration that holds, secrets as ``***``, and where each came from; without policies."""
    effective = question.runtime.config
    values = public(effective)
    assert isinstance(values, dict)  # noqa: S101 - public() makes a dict of a dataclass
    return as_json(
        {
            "values": {name: value for name, value in values.items() if name not in PUBLISHED_ELSEWHERE},
            "from": {dotted(at): where for at, where in effective.places.items()},
            "policies": list(effective.policies),
            "warnings": list(effective.warnings),
        }
    )
