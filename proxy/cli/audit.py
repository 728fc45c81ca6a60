"""``weir audit``: whether the audit is what was written, and what it says of a conversation."""

import json

import click
import msgspec

from proxy.access.destination import TENANT_SHOWN
from proxy.cli.output import table
from proxy.cli.shared import Findings, key_names, moment, reads
from proxy.config.values import Config
from proxy.store import Store
from proxy.store.chain import AuditRow, Verified

FACTS_SHOWN = 100
LISTED = 1_000


@click.group()
def audit() -> None:
    """Verify the audit log, and list what it says of a conversation.

    \b
    Example:
      weir audit verify
      weir audit list support-4711
    """


@audit.command()
@reads
async def verify(store: Store, config: Config) -> Findings:
    """Verify that no row of the audit log was changed, moved, or removed from between others.

    The first row that does not follow from the one before it is named, and the command fails. Keep
    the number and hash of each chain's last row somewhere else. Whoever can write to the database
    can cut a chain short or make it anew, and only a last row that was noted earlier shows that.

    \b
    Example:
      weir audit verify
    """
    chains = await store.verify()
    names = await key_names(store, config)

    def name_of(chain: Verified) -> str:
        return names.get(chain.tenant, chain.tenant[:TENANT_SHOWN]) or "operator"

    columns = {
        "chain": name_of,
        "from row": lambda chain: chain.first,
        "last good row": lambda chain: chain.last,
        "its hash": lambda chain: chain.head,
        "first broken": lambda chain: "-" if chain.broken is None else chain.broken,
    }
    broken = [name_of(chain) for chain in chains if chain.broken is not None]
    found = table(chains, columns, empty="The audit log is empty.")
    return Findings(found.value, found.show, f"changed: {', '.join(broken)}" if broken else "")


@audit.command("list")
@click.argument("conversation")
@reads
async def list_rows(store: Store, _: Config, *, conversation: str) -> Findings:
    """List what was done to a conversation, newest first. CONVERSATION is a name, or an id, also of
    a deleted one.

    \b
    Example:
      weir audit list support-4711
    """
    known = await store.conversation(None, conversation)
    rows = await store.audit(
        None, conversation=conversation if known is None else known.id, limit=LISTED
    )
    columns = {
        "at (UTC)": lambda row: moment(row.at),
        "row": lambda row: row.seq,
        "type": lambda row: row.type,
        "facts": lambda row: _shortened(json.dumps(row.told)),
        "request": lambda row: row.request or "-",
    }

    def plain(row: AuditRow) -> dict[str, object]:
        return {
            **msgspec.structs.asdict(row),
            "facts": row.told,
            "prev": row.prev.hex(),
            "hash": row.hash.hex(),
        }

    return table(rows, columns, plain=plain, empty="The audit log has no such rows.")


def _shortened(facts: str) -> str:
    return facts if len(facts) <= FACTS_SHOWN else f"{facts[:FACTS_SHOWN]}…"
