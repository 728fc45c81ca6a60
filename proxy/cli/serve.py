"""``weir serve``: the proxy."""

import contextlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from proxy.app import create_app
from proxy.cli import Failure
from proxy.cli.config import config_option, loaded
from proxy.config import Config, Flags, environment, hand_down, handed_down
from proxy.server import App, ServerLimits, run
from proxy.simulator.serving import run_simulator
from proxy.simulator.settings import SimulatorSettings
from proxy.telemetry import QueuedLog, Telemetry, TelemetrySettings
from proxy.tokenizer import Tokenizer
from proxy.upstream.providers import providers_for

DISTRIBUTION = "weir-proxy"
SIMULATED_WINDOW = 8192


@click.command()
@config_option
@click.option("--host", help="Address to listen on; else the configuration's (127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; else the configuration's (8400).")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; more than one want PostgreSQL.")
@click.option("--upstream", metavar="URL", help="Base URL of one upstream, e.g. http://127.0.0.1:9000/v1.")
@click.option("--window", type=click.IntRange(min=64), help="Context window of its models, tokens.")
@click.option("--policy", help="The default policy; 'off' relays everything.")
@click.option("--store", metavar="URL", help="The database, e.g. sqlite+aiosqlite:///weir.db.")
@click.option("--summarizer", metavar="MODEL", help="Model that writes summaries; 'same' for the request's own.")
@click.option("--log-format", type=click.Choice(["line", "json"]), default="line", show_default=True, help="Log lines.")
def serve(*, path: Path | None, log_format: str, **values: object) -> None:
    """Start the proxy.

    Without a configuration, an upstream or OPENAI_API_KEY it stands in front of the built-in simulator.

    \b
    Example:
      weir serve --upstream http://127.0.0.1:9000/v1 --window 8192
      export OPENAI_BASE_URL=http://127.0.0.1:8400/v1
    """
    flags = Flags(**values)  # type: ignore[arg-type]  # the options above, by the same names
    config = loaded(path, flags)
    with _logging(log_format), _upstream(config) as effective:
        _announce(effective)
        code = _run(effective, path, flags)
    if code:
        raise Failure(f"the proxy could not be started on {config.listen.host}:{config.listen.port}")


def worker_app() -> App:
    """The application of one of several processes, configured as the command that started them."""
    path, flags = handed_down(environment())
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    return _app(loaded(path, flags), path, flags)


def _run(config: Config, path: Path | None, flags: Flags) -> int:
    listen = config.listen
    if listen.workers > 1:
        hand_down(
            path, replace(flags, upstream=flags.upstream or _only_base(config) if config.simulate else flags.upstream)
        )
        app: App | str = "proxy.cli.serve:worker_app"
    else:
        app = _app(config, path, flags)
    return run(
        app,
        host=listen.host,
        port=listen.port,
        limits=_limits(config),
        workers=listen.workers,
        factory=listen.workers > 1,
    )


def _only_base(config: Config) -> str | None:
    return next((u.base_url for u in config.upstreams.values()), None)


def _app(config: Config, path: Path | None, flags: Flags) -> App:
    telemetry = Telemetry.create(
        TelemetrySettings(
            service_name=config.telemetry.service_name,
            service_version=importlib.metadata.version(DISTRIBUTION),
            otlp_endpoint=config.telemetry.otlp_endpoint,
            capture_content=config.telemetry.capture_content,
            environment=environment(),
        )
    )
    cache = environment().get("TIKTOKEN_CACHE_DIR")
    return create_app(
        config,
        telemetry=telemetry,
        tokenizer=Tokenizer(cache_dir=Path(cache) if cache else None),
        providers=providers_for(config.upstreams.values()),
        reload=lambda: loaded(path, flags),
    )


def _limits(config: Config) -> ServerLimits:
    limits = config.limits
    return ServerLimits(
        header_timeout=limits.header_timeout,
        body_timeout=limits.body_timeout,
        stall=limits.stall_timeout,
        header_bytes=limits.headers,
        header_fields=limits.header_fields,
        body_bytes=limits.body,
        concurrency=limits.concurrency,
        grace=limits.grace,
    )


@contextlib.contextmanager
def _upstream(config: Config) -> Iterator[Config]:
    """The configuration, with the simulator running behind it where nothing names an upstream."""
    if not config.simulate:
        yield config
        return
    settings = SimulatorSettings(window=config.window or SIMULATED_WINDOW)
    with run_simulator(settings, counter=Tokenizer().counter("o200k_base")) as running:
        yield replace(config.with_upstream(running.base_url), simulate=True, window=settings.window)


@contextlib.contextmanager
def _logging(form: str) -> Iterator[None]:
    handler = QueuedLog(sys.stderr, form="json" if form == "json" else "line")
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("weir").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.stop()


def _announce(config: Config) -> None:
    listen = config.listen
    where = ", ".join(f"{u.name} ({u.base_url or u.provider})" for u in config.upstreams.values())
    click.echo(f"Weir on http://{listen.host}:{listen.port}/v1 in front of {where}", err=True)
    if config.simulate:
        click.echo("No upstream is configured: this is the built-in simulator. --upstream URL changes that.", err=True)
    click.echo(f"  policy {config.default_policy}, keys: {config.auth.mode}, store {config.store.url}", err=True)
    click.echo(f"  export OPENAI_BASE_URL=http://{listen.host}:{listen.port}/v1", err=True)
    for warning in config.warnings:
        click.echo(f"  warning: {warning}", err=True)
