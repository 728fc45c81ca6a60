"""What a flow is told: summaries and likeness by real models, what an operator's own function leaves."""

import asyncio
from dataclasses import dataclass

from policies import ContextSettings, Effect, Reply, Summarize, Summary
from policies.effects import Compare, Trim
from proxy.caller import Caller
from proxy.perform import Performer
from proxy.runtime import Runtime
from proxy.similarity import by_shingles, by_vectors
from proxy.telemetry import Trace
from proxy.upstream.upstreams import CHAT, EMBEDDINGS
from proxy.wire.chat import ChatRequest, read_message

SUMMARIZER_SHARE = 0.7


@dataclass(slots=True)
class Replies:
    """Replies to the effects that planning one request asks for, at the caller's expense."""

    runtime: Runtime
    request: ChatRequest
    caller: Caller
    settings: ContextSettings
    trace: Trace

    async def __call__(self, effect: Effect) -> Reply:
        """The reply to one effect."""
        return await Performer(self._summarize, self._compare, self._trim)(effect)

    async def _summarize(self, effect: Summarize) -> Reply:
        """Have the summariser write; the request's own model and upstream where the policy says ``same``."""
        named, runtime = self.settings.summarizer, self.runtime
        model = self.request.model if named in (None, "same") else str(named)
        upstream = runtime.config.upstream(model)

        async def post(body: bytes) -> tuple[int, bytes]:
            return await runtime.upstreams.post(upstream, caller=self.caller, path=CHAT, body=body)

        with self.trace.summarizer(model, upstream.name) as span:
            reply = await runtime.summarizer.ask(
                effect, model=model, scope=f"{self.caller.tenant} {upstream.name}", send=post
            )
            result = "ok" if isinstance(reply, Summary) else getattr(reply, "reason", "failed")
            if result != "ok":
                span.fail(result)
        runtime.telemetry.metrics.summarizer(result)
        return reply

    async def _compare(self, effect: Compare) -> Reply:
        """How alike texts are, by the embeddings model that the policy names, else by their shingles."""
        if effect.model is None:
            return await asyncio.to_thread(by_shingles, effect)
        upstream = self.runtime.config.upstream(effect.model)

        async def post(body: bytes) -> tuple[int, bytes]:
            return await self.runtime.upstreams.post(upstream, caller=self.caller, path=EMBEDDINGS, body=body)

        return await by_vectors(effect, model=effect.model, send=post)

    async def _trim(self, effect: Trim) -> Reply:
        """What an operator's function leaves of the request's messages."""
        raws = self.request.messages or ()
        return await self.runtime.custom.trim(effect, [read_message(raws[i]) for i in effect.indices])


def summarizer_input(runtime: Runtime, settings: ContextSettings) -> int | None:
    """The tokens that the policy's summariser can read at once, None for the request's own limit."""
    named = settings.summarizer
    if named in (None, "same"):
        return None
    window = runtime.registry.facts(str(named), settings=settings).window
    return None if window is None else int(window * SUMMARIZER_SHARE)
