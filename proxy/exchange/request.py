"""A request as it is to be handled: what it asks, of which upstream, under which policy."""

import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from policies.settings import ContextSettings, Mode
from proxy.access.destination import Caller, Destination
from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidRequest, ProxyError
from proxy.exchange.held import HeldState
from proxy.planning.values import Paid, PlanRequest
from proxy.runtime import Runtime
from proxy.telemetry.names import service_at
from proxy.wire.codec import SEAL, ClientRequest, Codec
from proxy.wire.compaction import opened, unseal

COMPACT_PATH = "/responses/compact"

log = logging.getLogger("weir.exchange")

Headers = Sequence[tuple[bytes, bytes]]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, of whom, and what is to be planned of it; ``asked`` is None for a request that is not managed.

    ``client`` is what came, ``chat`` the whole that it stands for. ``compacts``: it has its history compacted and
    nothing else, which Weir may do.
    """

    client: ClientRequest
    chat: ClientRequest
    destination: Destination
    held: HeldState
    asked: PlanRequest | None = None
    replies: Paid | None = None
    compacts: bool = False


def settings_for(runtime: Runtime, caller: Caller, headers: Headers) -> ContextSettings:
    """The policy of a request: the key's, or the one that its headers ask for where the key allows it.

    Raises InvalidRequest for a policy or a mode that there is not.
    """
    config, sent = runtime.config, dict(headers)
    name, mode = caller.policy or config.default_policy, None
    if b"x-weir-policy" in sent and "policy" in caller.allow:
        name = sent[b"x-weir-policy"].decode("latin-1").strip()
    if b"x-weir-mode" in sent and "mode" in caller.allow:
        try:
            mode = Mode(sent[b"x-weir-mode"].decode("latin-1").strip().lower())
        except ValueError:
            raise InvalidRequest("x-weir-mode must be enforce, observe or off.") from None
    try:
        return runtime.policy(name, mode)
    except KeyError:
        known = ", ".join(sorted(config.policies))
        raise InvalidRequest(f"There is no policy {name[:80]!r}; there are: {known}.") from None


def parsed_for(runtime: Runtime, caller: Caller, codec: Codec, body: bytes) -> ClientRequest:
    """The request in a body. Raises InvalidJSON or InvalidRequest."""
    try:
        chat = runtime.planner.transcripts.parse(codec, body, tenant=caller.tenant)
    except ProxyError:
        raise
    except Exception:
        log.exception("a body is parsed by itself: what is known of earlier ones could not be used")
        chat = codec.parse(body)
    return opened_for(runtime, caller, chat)


def opened_for(runtime: Runtime, caller: Caller, chat: ClientRequest) -> ClientRequest:
    """The request with what its compaction of Weir's stands for. Raises InvalidRequest for another caller's."""
    is_sealed = SEAL in chat.codec.words and chat.messages is not None and chat.messages.mentions(SEAL)
    return opened(chat, partial(unseal, tenant=caller.tenant, secret=runtime.secret)) if is_sealed else chat


def is_native(chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    known = chat.codec.providers
    return bool(known) and service_at(upstream.address, upstream.name, upstream.provider)[0] in known
