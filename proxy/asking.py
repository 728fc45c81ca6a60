"""Asking models from the command line: each question goes to the model that its purpose has, at one's own cost."""

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self

from policies import Failed, Summarize, Summary
from proxy.access.caller import Caller
from proxy.access.destination import CHAT_PATH, Destination, by_weir
from proxy.config import Config
from proxy.effects.allowance import Spent
from proxy.effects.perform import EffectHandler
from proxy.effects.summarizer import MAX_ANSWER, Summarizer, SummarizerTerms
from proxy.errors import UpstreamUnreachable
from proxy.upstream.client import Client, StreamBroken
from proxy.upstream.providers import providers_for
from proxy.upstream.upstreams import Upstreams, own_headers

SECONDS = 300.0
"""Longest wait for one answer: nobody waits behind it, and a model on one's own machine takes its time."""
AT_ONCE = 4
TENANT = "0" * 32
UNLIMITED = 1 << 60


class Models(EffectHandler):
    """Answers effects by real models; ``spent`` adds up what that took, ``failures`` how often what went wrong.

    ``default`` is asked for what no purpose in ``by_purpose`` names, ``at_once`` questions at a time and each for so
    many ``seconds``. To be entered; leaving it closes its connections.
    """

    def __init__(
        self,
        config: Config,
        *,
        default: str,
        by_purpose: Mapping[str, str],
        tokens: int | None,
        at_once: int = AT_ONCE,
        seconds: float = SECONDS,
    ) -> None:
        self._config = config
        self._default = default
        self._by_purpose = by_purpose
        self._tokens = tokens if tokens is not None else UNLIMITED
        self._seconds = seconds
        self._turns = asyncio.Semaphore(at_once)
        self._summarizer = Summarizer()
        self._upstreams: Upstreams | None = None
        self._caller = Caller(tenant=TENANT, credential=os.environ.get("OPENAI_API_KEY", "").encode())
        self.spent = Spent()
        self.failures: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._upstreams = Upstreams(Client(instance="evaluate"), providers_for(self._config.upstreams.values()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._summarizer.close()
        if self._upstreams is not None:
            await self._upstreams.close()

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        """What the model of a purpose writes."""
        if effect.standing:
            return Failed("not_in_place")
        model = self._by_purpose.get(effect.purpose, self._default)
        upstream = self._config.upstream(model)
        terms = SummarizerTerms(
            tenant=TENANT, upstream=upstream.name, model=model, seconds=self._seconds, tokens_per_hour=self._tokens
        )
        destination = by_weir(upstream, self._caller, path=CHAT_PATH, model=model)
        async with self._turns:  # a server with one slot has the others wait, and their time runs
            told = await self._summarizer.ask(effect, terms=terms, send=partial(self._post, destination))
        if told.usage is not None:
            self.spent += Spent(calls=1, asked=told.usage.prompt or 0, answered=told.usage.completion or 0)
        elif told.source == "asked":
            self.spent += Spent(calls=1)
        if told.result != "ok":
            self.failures[told.result] = self.failures.get(told.result, 0) + 1
        return told.reply

    async def _post(self, destination: Destination, body: bytes) -> tuple[int, bytes]:
        assert self._upstreams is not None  # noqa: S101 - it was entered
        headers = own_headers(destination)
        answer = await self._upstreams.send(destination, method="POST", headers=headers, body=body)
        try:
            return answer.status, await answer.read(MAX_ANSWER)
        except StreamBroken as error:
            raise UpstreamUnreachable(str(error)) from None
        finally:
            answer.close()
