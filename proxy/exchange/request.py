"""A request as it is to be handled: what it asks, and of which upstream."""

import msgspec

from proxy.access.destination import Destination
from proxy.features.held_history import HeldState
from proxy.planning.values import Paid, PlanRequest
from proxy.wire.codec import ClientRequest


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, of whom, and what is to be planned of it; ``asked`` is None for a request that
    is not managed.

    ``client`` is what came, ``chat`` the whole that it stands for. ``compacts``: it has its history
    compacted and nothing else, which Weir may do.
    """

    client: ClientRequest
    chat: ClientRequest
    destination: Destination
    held: HeldState
    asked: PlanRequest | None = None
    replies: Paid | None = None
    compacts: bool = False
