"""Sending a request to where it was decided to go, with whose credential."""

import dataclasses
import re
from collections.abc import AsyncIterator, Mapping

from proxy.access.caller import Caller
from proxy.access.destination import CHAT_PATH, Destination
from proxy.config import UpstreamSettings
from proxy.errors import UpstreamUnreachable
from proxy.upstream.client import CREDENTIALS, Answer, Client, Headers, StreamBroken, Target, credential_field
from proxy.upstream.providers import LitellmProvider

_STEERING = re.compile(
    rb"(?:x-portkey|helicone|(?:x-)?litellm|cf-aig|x-envoy|x-gateway|x-bf|x-bifrost|x-kong|x-ai-eg)-.*"
    rb"|.*(?:model|deployment|fallback|provider|target-url|override).*|x-(?:http-)?method|x-(?:original|rewrite)-ur[il]",
    re.IGNORECASE | re.DOTALL,
)
"""What chooses another model, provider, method or path in a gateway behind Weir, without any word in path or body."""


class Upstreams:
    """Sends requests to the configured upstreams."""

    def __init__(self, client: Client, providers: Mapping[str, LitellmProvider]) -> None:
        self._client = client
        self._providers = dict(providers)
        self._targets: dict[UpstreamSettings, Target] = {}

    async def send(
        self,
        destination: Destination,
        *,
        method: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        query: bytes = b"",
        drop: frozenset[bytes] = frozenset(),
        attempt: int = 0,
        length: int | None = None,
    ) -> Answer:
        """The answer's head, its body unread.

        Raises ProxyError for an upstream that cannot be reached or does not answer in time.
        """
        upstream, caller = destination.upstream, destination.caller
        if upstream.kind == "litellm":
            provider = self._providers.get(upstream.name)
            if provider is None or destination.path != CHAT_PATH or not isinstance(body, bytes):
                raise UpstreamUnreachable(f"Upstream {upstream.name!r} answers chat completions only.")
            return await provider.send(body=body, credential=caller.credential, headers=headers)
        return await self._client.send(
            self._target(upstream),
            method=method,
            path=destination.path,
            query=query,
            headers=_with_credential(_judged(headers, caller), upstream, caller),
            body=body,
            tenant=caller.tenant,
            attempt=attempt,
            drop=drop,
            length=length,
            hidden=caller.credential if caller.name is not None and upstream.passes_key else b"",
        )

    async def post(self, destination: Destination, body: bytes) -> tuple[int, bytes]:
        """Status and body of a JSON request of Weir's own, sent with the caller's credential."""
        answer = await self.send(destination, method="POST", headers=own_headers(destination), body=body)
        return await _whole(answer)

    async def get(
        self, upstream: UpstreamSettings, *, caller: Caller, url: str, body: bytes | None
    ) -> tuple[int, bytes]:
        """Status and body of a question to another address of the same upstream."""
        base, _, path = url.rpartition("/")
        target = dataclasses.replace(self._target(upstream), base_url=base)
        headers = _own_credential(upstream, caller)
        answer = await self._client.send(
            target, method="POST" if body else "GET", path=f"/{path}", headers=headers, body=body, tenant=caller.tenant
        )
        return await _whole(answer)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()
        for provider in self._providers.values():
            await provider.close()

    def _target(self, upstream: UpstreamSettings) -> Target:
        target = self._targets.get(upstream)
        if target is None:
            target = self._targets[upstream] = Target(
                name=upstream.name,
                base_url=upstream.base_url or "",
                api_key=None if upstream.passes_key else upstream.api_key.get_secret_value(),
                auth=upstream.credential,
                connect=upstream.timeout.connect,
                first_byte=upstream.timeout.first_byte,
                idle=upstream.timeout.idle,
            )
        return target


async def _whole(answer: Answer) -> tuple[int, bytes]:
    try:
        return answer.status, await answer.read()
    except StreamBroken as error:
        raise UpstreamUnreachable(str(error)) from None
    finally:
        answer.close()


def _judged(headers: Headers, caller: Caller) -> Headers:
    """The headers without those by which a key could get what its list of models does not have."""
    if not caller.is_restricted:
        return headers
    return [(name, value) for name, value in headers if _STEERING.fullmatch(name) is None]


def _with_credential(headers: Headers, upstream: UpstreamSettings, caller: Caller) -> Headers:
    """The headers with the credential that goes upstream: a key of Weir's own never does."""
    if caller.name is None or not upstream.passes_key:
        return headers
    kept = [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]
    return [*kept, *_own_credential(upstream, caller)]


def own_headers(destination: Destination) -> list[tuple[bytes, bytes]]:
    """The headers of a JSON request of Weir's own."""
    return [(b"content-type", b"application/json"), *_own_credential(destination.upstream, destination.caller)]


def _own_credential(upstream: UpstreamSettings, caller: Caller) -> list[tuple[bytes, bytes]]:
    if not caller.credential:
        return []
    name, value = credential_field(upstream.credential, caller.credential.decode("latin-1"))
    return [(name.encode(), value.encode("latin-1"))]
