"""``weir serve``: the proxy."""

import asyncio
import contextlib
import importlib.metadata
import io
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import click

from proxy.access.admission import Keyring
from proxy.app import create_app
from proxy.cli import Failure
from proxy.cli.shared import config_option, given_again, listening, loaded, store_url, vocabularies
from proxy.config.loading import environment, load_config
from proxy.config.values import Config, Flags, masked_url, secrets_of
from proxy.features.plugins import Plugin, Plugins
from proxy.server import App, ServerLimits, run
from proxy.store import Store
from proxy.store.records import StoreError
from proxy.telemetry.logs import QueuedLog
from proxy.telemetry.process import collect_seldom
from proxy.telemetry.setup import OtelSettings, Telemetry, TelemetryError
from proxy.upstream.client import providers_for
from proxy.wire.counting import Tokenizer, installed_estimators

log = logging.getLogger("weir")

DISTRIBUTION = "weir-proxy"
HOOKS = "weir.hooks"
SIMULATED_WINDOW = 8192
MAX_DESCRIPTORS = 65_536
OWN_DESCRIPTORS = 64  # the database, libraries, listeners, exporters
COLLECT_AFTER = 20_000


@click.command()
@config_option
@click.option("--host", help="Address to listen on; defaults to the configuration's (127.0.0.1).")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port; defaults to the configuration's (8400)."
)
@click.option(
    "--upstream", metavar="URL", help="Base URL of one upstream, e.g. http://127.0.0.1:9000/v1."
)
@click.option("--window", type=click.IntRange(min=64), help="Context window of its models, tokens.")
@click.option(
    "--auth-mode",
    type=click.Choice(["auto", "keys", "open"]),
    help="Who may call; defaults to the configuration's (auto).",
)
@click.option("--policy", help="The default policy; 'off' forwards everything unchanged.")
@click.option("--store", metavar="PATH|URL", callback=store_url, help="The database, e.g. weir.db.")
@click.option(
    "--summarizer",
    metavar="MODEL",
    help="Model that writes summaries; 'same' for the request's own.",
)
@click.option(
    "--log-format", type=click.Choice(["line", "json"]), default="line", help="Log format."
)
def serve(*, path: Path | None, log_format: str, **values: object) -> None:
    """Start the proxy.

    Without a configuration, an upstream or OPENAI_API_KEY it uses the built-in simulator as its
    upstream.

    \b
    Example:
      weir serve --upstream http://127.0.0.1:9000/v1 --window 8192
      export OPENAI_BASE_URL=http://127.0.0.1:8400/v1
    """
    flags = Flags(**values)  # type: ignore[arg-type]  # the options above, by the same names
    config = loaded(path, flags)
    if not config.simulate:  # a SIGHUP before the handler is installed would end the process
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        telemetry = Telemetry.create(_telemetry_settings(config))
    except TelemetryError as error:
        raise Failure(f"telemetry: {error}") from error
    process = _Process(path, flags, log_format, telemetry)
    with (
        _logging(process.log),
        _listening(config) as listener,
        _upstream(config, process.tokenizer) as effective,
    ):
        keys = _check_store(effective)
        making = (
            "weir keys create --name"
            f" me{given_again(path, flags.store and masked_url(flags.store))}"
        )
        _announce(effective, listener.getsockname()[1], keys, making)
        code = process.run(effective, listener)
    if code:
        raise Failure("the proxy could not be started; the log above says why")


class _Process:
    """What a process was started with, its log, and its tokenizer."""

    def __init__(
        self, path: Path | None, flags: Flags, log_format: str, telemetry: Telemetry
    ) -> None:
        self._path = path
        self._flags = flags
        self._telemetry = telemetry
        self.tokenizer = Tokenizer(cache_dir=vocabularies(), estimators=installed_estimators())
        self.log = _open_log(log_format)

    def run(self, config: Config, listener: socket.socket) -> int:
        collect_seldom(COLLECT_AFTER)
        return run(self.app(config), sockets=[listener], limits=_limits(config))

    def app(self, config: Config) -> App:
        self._hide(config)
        self._telemetry.metrics.dropped.watch(self.log.losses)
        return create_app(
            config,
            telemetry=self._telemetry,
            tokenizer=self.tokenizer,
            providers=providers_for(config.upstreams.values()),
            reload=None if config.simulate else self._read_again,
            hooks=installed_plugins(),
        )

    def _read_again(self) -> Config:
        fresh = load_config(self._path, env=environment(), flags=self._flags)
        self._hide(fresh)
        return fresh

    def _hide(self, config: Config) -> None:
        env = environment().items()
        headers = (
            value for name, value in env if name.startswith("OTEL_") and name.endswith("_HEADERS")
        )
        values = (pair.partition("=")[2].strip() for each in headers for pair in each.split(","))
        self.log.hide(
            (*secrets_of(config), *(text for value in values for text in (value, unquote(value))))
        )


def _telemetry_settings(config: Config) -> OtelSettings:
    chosen = config.telemetry
    return OtelSettings(
        service_name=chosen.service_name,
        service_version=importlib.metadata.version(DISTRIBUTION),
        otlp_endpoint=chosen.otlp_endpoint,
        otlp_protocol=chosen.otlp_protocol,
        deployment=chosen.environment,
        capture_content=chosen.capture_content,
        read_baggage=chosen.read_baggage,
    )


def installed_plugins() -> tuple[Plugin, ...]:
    """One object of each class or function that an installed distribution names in the group
    ``weir.hooks``.
    """
    found: list[Plugin] = []
    for entry in importlib.metadata.entry_points(group=HOOKS):
        try:
            found.append(entry.load()())
            Plugins(found[-1:])
        except Exception as error:
            # whatever a plugin's own code raises, the start says which one it was
            raise Failure(
                f"the plugin {entry.name} ({entry.value}) cannot be used: {error}"
            ) from error
    return tuple(found)


def _listening(config: Config) -> socket.socket:
    """Bound before anything is announced, so that the announced port is correct."""
    return listening(config.listen.host, config.listen.port)


def _check_store(config: Config) -> Keyring:
    """Open the store once, so that its faults are reported before a client connects; returns its
    keys.
    """

    async def check() -> Keyring:
        store = await Store.open(config.store.url, content=config.store.content)
        try:
            rows = await store.list_keys()
            secret = await store.secret()
            return Keyring(config.keys, rows, secret=secret, mode=config.auth.mode)
        finally:
            await store.close()

    try:
        return asyncio.run(check())
    except StoreError as error:
        raise Failure(
            f"the store {masked_url(config.store.url)} cannot be used: {error}"
        ) from error


def _limits(config: Config) -> ServerLimits:
    limits = config.limits
    return ServerLimits(
        header_timeout=limits.header_timeout,
        body_timeout=limits.body_timeout,
        stall=limits.stall_timeout,
        header_bytes=limits.headers,
        header_fields=limits.header_fields,
        connections=_most_connections(),
        drain=limits.drain,
        grace=limits.grace,
    )


def _most_connections() -> int:
    """Clients' connections for which there are descriptors, in addition to as many to upstreams,
    and as many that are refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(8, (there - OWN_DESCRIPTORS) // 3)


@contextlib.contextmanager
def _upstream(config: Config, tokenizer: Tokenizer) -> Iterator[Config]:
    if not config.simulate:
        yield config
        return
    from proxy.simulator import SimulatorSettings, run_simulator  # noqa: PLC0415 - only here

    settings = SimulatorSettings(window=config.window or SIMULATED_WINDOW)
    with run_simulator(settings, counter=tokenizer.counter("o200k_base")) as running:
        yield replace(config.with_upstream(running.base_url), simulate=True, window=settings.window)


def _open_log(form: str) -> QueuedLog:
    """The log on a descriptor of its own: a thread that waits inside ``sys.stderr`` would hold up
    the exit.
    """
    stream = io.TextIOWrapper(
        io.FileIO(os.dup(sys.stderr.fileno()), "w"),
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
    return QueuedLog(stream, form="json" if form == "json" else "line")


@contextlib.contextmanager
def _logging(handler: QueuedLog) -> Iterator[None]:
    _log_to(handler)
    try:
        yield
    finally:
        # Without any handler a library's thread would print to standard error itself, secrets
        # included, and block there.
        logging.getLogger().addHandler(logging.NullHandler())
        logging.getLogger().removeHandler(handler)
        handler.stop()


def _log_to(handler: logging.Handler) -> None:
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("weir").setLevel(logging.INFO)
    # Python prints these with the exception's text.
    threading.excepthook = lambda found: log.error("a thread ended", exc_info=found.exc_value)
    sys.unraisablehook = lambda found: log.error(
        "an exception could not be raised", exc_info=found.exc_value
    )


def _first_key(making: str) -> Iterator[str]:
    yield (
        "  there is no key: nobody may call until you make one, which takes effect within two"
        " seconds:"
    )
    yield f"    {making}"
    yield f"    docker exec CONTAINER {making}    # where this is a container"


def _announce(config: Config, port: int, keys: Keyring, making: str) -> None:
    root = f"http://{config.listen.host}:{port}"
    who = "anybody on this machine" if config.listen.loopback else "ANYBODY WHO CAN CONNECT"
    allowed = f"whoever has one of {len(keys)} keys" if len(keys) else "nobody yet"
    if keys.is_open:
        allowed = who
    if config.simulate:
        where = (
            f"the built-in simulator (window {config.window} tokens); --upstream URL changes that"
        )
    else:
        named = (
            (u.name, masked_url(u.base_url) if u.base_url else u.provider)
            for u in config.upstreams.values()
        )
        where = ", ".join(f"{name} ({address})" for name, address in named)
    lines = (
        f"Weir on {root}/v1 in front of {where}",
        (
            f"  policy {config.default_policy}, store {masked_url(config.store.url)}, open to"
            f" {allowed}"
        ),
        *(_first_key(making) if not keys.is_open and not len(keys) else ()),
        f"  export OPENAI_BASE_URL={root}/v1",
        f"  what it does is shown at {root}/weir/ui",
        *(f"  warning: {warning}" for warning in config.warnings),
    )
    # a log that cannot be written does not stop the service
    with contextlib.suppress(OSError):
        for line in lines:
            click.echo(line, err=True)
