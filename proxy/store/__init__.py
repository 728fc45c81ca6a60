"""What Weir stores: conversations, their edits and evictions, the archive, exchanges, keys, learned
limits.

Everything outside this package uses only :class:`Store`, :class:`WriteBehindQueue`, the records and
the errors.
"""

from proxy.store.store import Store
from proxy.store.write_queue import WriteBehindQueue

__all__ = ("Store", "WriteBehindQueue")
