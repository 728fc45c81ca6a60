"""Watching: what it costs to remember and count a request, part by part, and what Weir adds at
100,000 tokens.

    python -m benchmarks.watching [--requests N] [--connections N] [--otlp] [--json FILE]

The parts are timed on planned exchanges of an agent's conversation of about 100,000 tokens, in this
process: in a window that leaves room, and in one that is too small, so that batches were made and
every rule of health has to be looked at. ``--otlp`` records traces too (they are not sent). Then
Weir runs as its users start it, with streamed answers, and says itself what it added
(``x-weir-overhead-ms``).
"""

import argparse
import asyncio
import gc
import http.client
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT, Cores, companion, weir
from benchmarks.stub import digest
from benchmarks.traffic import KEY, Conversation
from proxy.access.admission import credentials_in
from proxy.app import running
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.exchange.exchange import Exchange
from proxy.exchange.metrics import count
from proxy.exchange.plan import plan_request
from proxy.exchange.read import read_request
from proxy.exchange.record import record_of
from proxy.exchange.row import row_of
from proxy.exchange.run import ExchangeHandler
from proxy.exchange.send import attempts_for
from proxy.exchange.sinks import end_trace, record_exchange, write_line
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage, Tap
from proxy.telemetry.logs import QueuedLog
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import Tokenizer

ROOMY = 200_000
NARROW = 110_000
WARM_UP = 5
HEADERS = [(b"authorization", b"Bearer " + KEY.encode())]
MAX_SETTLE_MS = 5.0
MAX_OVERHEAD_MS = 25.0

Times = dict[str, list[float]]


class Nowhere(SpanExporter):
    """Takes spans and does nothing with them."""

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Nothing."""
        return SpanExportResult.SUCCESS


async def parts(window: int, *, requests: int, otlp: bool, tokenizer: Tokenizer) -> Times:
    """Microseconds of each part of ``record_exchange``, and of the whole, for so many requests of
    one conversation.
    """
    telemetry = Telemetry.create(OtelSettings(), span_exporter=Nowhere() if otlp else None)
    flags = Flags(
        upstream="http://127.0.0.1:9/v1", window=window, store="sqlite+aiosqlite:///:memory:"
    )
    found: Times = defaultdict(list)
    async with running(
        load_config(None, env={}, flags=flags), telemetry=telemetry, tokenizer=tokenizer
    ) as runtime:
        conversation = Conversation(random.Random("watching"))
        for number in range(requests + WARM_UP):
            exchange = await _planned(runtime, conversation.next().data.partition(b"\r\n\r\n")[2])
            into = found if number >= WARM_UP else defaultdict(list)
            gc.disable()
            if number % 2:
                begun = time.perf_counter()
                record_exchange(runtime, exchange)
                into["whole"].append(1e6 * (time.perf_counter() - begun))
            else:
                _in_parts(runtime, exchange, into)
            gc.enable()
            await runtime.preparation.settled()
    await asyncio.to_thread(telemetry.shutdown)
    return dict(found)


async def _planned(runtime: Runtime, body: bytes) -> Exchange:
    """An exchange that was planned and answered."""
    handler = ExchangeHandler(runtime, {"method": "POST", "headers": HEADERS}, _nothing, _nowhere)
    exchange = handler.exchange
    exchange.caller = runtime.keyring.identify(credentials_in(HEADERS))
    request = await read_request(runtime, exchange, body, exchange.caller)
    plan = await plan_request(runtime, exchange, request)
    attempts = attempts_for(runtime, exchange, request)
    exchange.ready = attempts.called = time.perf_counter()
    attempts.span = exchange.trace.attempt(exchange.model, "openai")
    exchange.status = 200
    exchange.seen = Tap(
        usage=ReportedUsage(plan.sent, 120, plan.sent // 2),
        finish_reasons=["stop"],
        ends={0: True},
        model="gpt-4o-mini",
        id="chatcmpl-1",
        said=True,
        done=True,
    )
    return exchange


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _nowhere(message: MutableMapping[str, Any]) -> None:
    del message


def _in_parts(runtime: Runtime, exchange: Exchange, found: Times) -> None:
    """What ``record_exchange`` does, each part timed."""

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        found[name].append(1e6 * (time.perf_counter() - begun))
        return result

    record = timed(
        "record, health",
        lambda: record_of(exchange, runtime, ended=time.perf_counter()),
    )
    timed("trace", lambda: end_trace(record))
    timed("metrics", lambda: count(runtime.telemetry.metrics, record))
    timed("log", lambda: write_line(runtime.logger, record))
    if record.tokens is not None and exchange.plan.recognized is not None:
        row = timed("row", partial(row_of, record, record.tokens, exchange.plan.recognized))
        timed("queue", partial(runtime.write_queue.put, row))
        if exchange.plan_request is not None:
            timed(
                "preparation",
                partial(runtime.preparation.after, exchange.plan_request, exchange.plan),
            )


def overhead(*, connections: int, requests: int) -> dict[str, Any]:
    """What Weir says that it added to streamed requests of 100,000 tokens, ms, and its own
    histogram of settling.
    """
    cores = Cores.split()
    added: list[float] = []
    tokens: list[str] = []
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        place = Path(home)
        with (
            companion("stub", name="direct", cores=cores.others, home=place) as stub,
            weir(
                "weir", upstream=stub.port, window=ROOMY, cores=cores.tested, home=place
            ) as tested,
        ):
            threads = [
                threading.Thread(
                    target=_talk, args=(tested.port, seed, requests // connections, added, tokens)
                )
                for seed in range(connections)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            page = _page(tested.port)
    count = page["weir_settlement_seconds_count"]
    total = page["weir_settlement_seconds_sum"]
    return {
        "requests": len(added),
        "tokens": tokens[-1],
        **{name: round(value, 3) for name, value in _spread(added).items()},
        "settle_mean_ms": round(1000 * total / count, 4),
    }


def _talk(port: int, seed: int, requests: int, added: list[float], tokens: list[str]) -> None:
    """One agent: each request is the one before and two messages more; the first, which is cold, is
    left out.
    """
    conversation = Conversation(random.Random(f"watching {seed}"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in range(requests + 1):
        body = (
            conversation.next()
            .data.partition(b"\r\n\r\n")[2]
            .replace(b'"stream":false', b'"stream":true', 1)
        )
        headers = {"authorization": f"Bearer {KEY}", "x-bench-digest": digest(body).decode()}
        connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200 or not said.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{answer.status}: {said[:200]!r}")
        if number:
            added.append(float(answer.headers["x-weir-overhead-ms"]))
            tokens.append(answer.headers["x-weir-tokens"])
    connection.close()


def _page(port: int) -> dict[str, float]:
    """The samples of ``/metrics`` without labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    pairs = (line.split(" ") for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}


def _spread(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table(title="Watching one request, us")
    for name in ("part", "room: median", "p95", "batches: median", "p95"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name in result["room"]:
        cells = [
            f"{result[where][name][key]:.1f}"
            for where in ("room", "batches")
            for key in ("median", "p95")
        ]
        table.add_row(name, *cells)
    console.print(table)
    whole = max(result[where]["whole"]["p95"] for where in ("room", "batches")) / 1000
    told = result["overhead"]
    console.print(
        f"settle, p95: {whole:.3f} ms of {MAX_SETTLE_MS:g} ms, met: {whole <= MAX_SETTLE_MS}"
    )
    met = told["p95"] < MAX_OVERHEAD_MS
    console.print(
        f"overhead over {told['requests']} streams of {told['tokens']}: {told} ms, p95 met: {met}"
    )


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=120, help="of each part of the run (120)")
    parser.add_argument(
        "--connections", type=int, default=4, help="agents at once in the run over HTTP (4)"
    )
    parser.add_argument("--otlp", action="store_true", help="record traces")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write")
    arguments = parser.parse_args()
    tokenizer = Tokenizer()
    sink = ROOT / "benchmarks" / "results"
    sink.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    with (sink / "watching.log").open("w") as stream:
        handler = QueuedLog(stream)
        _listen(handler)
        for name, window in (("room", ROOMY), ("batches", NARROW)):
            times = asyncio.run(
                parts(window, requests=arguments.requests, otlp=arguments.otlp, tokenizer=tokenizer)
            )
            result[name] = {
                part: {"median": median(v), "p95": _spread(v)["p95"]} for part, v in times.items()
            }
        handler.stop()
    tokenizer.close()
    result["overhead"] = overhead(connections=arguments.connections, requests=arguments.requests)
    show(result, Console(width=110))
    path = arguments.json or sink / f"watching-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _listen(handler: QueuedLog) -> None:
    """Have Weir's log written as ``weir serve`` does."""
    logging.getLogger().addHandler(handler)
    logging.getLogger("weir").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
