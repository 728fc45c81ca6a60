"""``weir doctor``: everything that a request needs, checked once, a line each with what to do."""

import asyncio
import errno
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import click

from proxy.access.destination import upstream_for
from proxy.cli import EXIT_FAILED, Failure
from proxy.cli.output import print_table
from proxy.cli.run import weir_address
from proxy.cli.shared import (
    Reached,
    Unreached,
    config_option,
    counted,
    get,
    in_yaml,
    is_weir,
    json_option,
    loaded,
    print_json,
    reading,
    store_option,
    vocabularies,
    writing,
)
from proxy.config.file import ConfigError, dotted, leaves_of
from proxy.config.loading import environment, load_config
from proxy.config.values import Config, Flags, UpstreamSettings, masked_url, public
from proxy.models.facts import ModelFacts, ModelRegistry, Probe
from proxy.store import Store
from proxy.store.records import DAY
from proxy.upstream.client import credential_field
from proxy.wire.counting import Tokenizer

SECONDS = 10.0
# retention ignores a clock that is a day ahead
CLOCK_WARN = 60.0
CLOCK_FAIL = DAY
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
ENCODING = "o200k_base"
SHOWN = 5
SQLITE = "sqlite+aiosqlite:///"
SAID_BY = {
    "policy": "from the policy",
    "rule": "from your rule",
    "upstream": "as the upstream says",
    "table": "from litellm's table",
    "family": "by its family's name",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    check: str
    state: Literal["ok", "warn", "fail"]
    said: str
    do: str = ""


@click.command()
@config_option
@store_option
@click.option(
    "--model", help="The model to look up; defaults to the first that a rule or an upstream names."
)
@click.option(
    "--values",
    is_flag=True,
    help="Only show every value of the configuration, and where it came from.",
)
@json_option
def doctor(
    *, path: Path | None, store: str | None, model: str | None, values: bool, as_json: bool
) -> int:
    """Check what a request needs: configuration, upstream, key, model and window, store,
    vocabulary, clock, port.

    Nothing is sent to a model: each upstream is asked for its list of models. Each fault of a
    configuration file is one line with file, line and path. Exits with 1 if a check failed. Secrets
    are shown as ***.

    \b
    Example:
      weir doctor
      weir doctor --config weir.yaml --model gpt-5-mini --json
      weir doctor --values
    """
    if values:
        return _show_values(loaded(path, Flags(store=store)), as_json=as_json)
    found: list[Diagnosis] = []
    for each in _diagnoses(path, store, model):
        found.append(each)
        if not as_json:
            state = click.style(f"{each.state:<4}", fg=COLOURS[each.state])
            click.echo(f"{state}  {each.check}: {each.said}{f': {each.do}' if each.do else ''}")
    failed = any(each.state == "fail" for each in found)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(each) for each in found]})
    return EXIT_FAILED if failed else 0


def _show_values(config: Config, *, as_json: bool) -> int:
    data = public(config, as_written=not as_json)
    policies = {
        f"policies.{name}": (
            f"weir policy show {name}",
            config.places.get(("policies", name), "default"),
        )
        for name in config.policies
    }
    rows = {
        dotted(at): (in_yaml(value), config.places.get(at, "default"))
        for key, section in data.items()
        for at, value in leaves_of(section, (key,))
        if key not in {"policies", "warnings"}
    }
    if as_json:
        print_json(data)
    else:
        print_table(
            ("value", "", "from"), [(name, *row) for name, row in (rows | policies).items()]
        )
    return 0


def _diagnoses(path: Path | None, store: str | None, model: str | None) -> Iterator[Diagnosis]:
    try:
        config = load_config(path, env=environment(), flags=Flags(store=store))
    except ConfigError as fault:
        for problem in fault.problems:
            yield Diagnosis("configuration", "fail", problem)
        return
    yield Diagnosis("configuration", "ok", str(config.path or "no file, the defaults"))
    for warning in config.warnings:
        yield Diagnosis("configuration", "warn", warning)
    if config.simulate:
        yield Diagnosis(
            "upstream",
            "warn",
            "none is named, the built-in simulator will answer",
            "weir init writes one",
        )
    listed: list[str] = []
    for upstream in config.upstreams.values():
        yield from _upstream(upstream, listed)
    yield _model(config, model, listed)
    yield from _store(config)
    yield _vocabulary(model)
    yield _port(config)


def _upstream(upstream: UpstreamSettings, listed: list[str]) -> Iterator[Diagnosis]:
    name = f"upstream {upstream.name}"
    if upstream.base_url is None:
        yield Diagnosis(
            name,
            "warn",
            f"litellm's provider {upstream.provider} is not asked",
            "send it one request",
        )
        return
    begun = time.monotonic()
    try:
        answer = get(f"{upstream.base_url}/models", _headers(upstream), seconds=SECONDS)
    except Unreached as fault:
        yield Diagnosis(
            name,
            "fail",
            f"{upstream.base_url}: {fault}",
            "check base_url, the server and the network",
        )
        return
    yield Diagnosis(
        name, "ok", f"{upstream.base_url} answers in {(time.monotonic() - begun) * 1000:.0f} ms"
    )
    yield _key(upstream, answer)
    yield from _clock(answer, upstream.name)
    entries = answer.json() if answer.status == 200 else None
    data = entries.get("data") if isinstance(entries, dict) else None
    listed += [str(each.get("id")) for each in data or () if isinstance(each, dict)]


def _sent(upstream: UpstreamSettings) -> str:
    return (
        environment().get("OPENAI_API_KEY", "")
        if upstream.passes_key
        else upstream.api_key.get_secret_value()
    )


def _headers(upstream: UpstreamSettings) -> dict[str, str]:
    key = _sent(upstream)
    version = {"anthropic-version": "2023-06-01"}
    return dict([credential_field(upstream.credential, key)]) | version if key else version


def _key(upstream: UpstreamSettings, answer: Reached) -> Diagnosis:
    name = f"key of {upstream.name}"
    where = f"upstreams.{upstream.name}.api_key"
    key = _sent(upstream)
    if answer.status in (401, 403) and upstream.passes_key:
        tried = (
            f"OPENAI_API_KEY is refused ({answer.status})"
            if key
            else "OPENAI_API_KEY is not set here"
        )
        return Diagnosis(
            name,
            "warn",
            f"every client sends its own, and {tried}",
            f"set it, or {where} for all clients",
        )
    if answer.status in (401, 403):
        return Diagnosis(
            name, "fail", f"it is refused ({answer.status})", f"put a valid key into {where}"
        )
    if answer.status != 200:
        return Diagnosis(
            name,
            "warn",
            f"/models answers {answer.status}, so it was not tried",
            "send one request",
        )
    if not isinstance(answer.json(), dict):
        kind = answer.headers.get("content-type", "").partition(";")[0] or "no type"
        said = f"/models answers 200 with {kind}, no list of models, so it was not tried"
        return Diagnosis(
            name, "warn", said, f"does upstreams.{upstream.name}.base_url lead to the API?"
        )
    return Diagnosis(name, "ok", "it is accepted" if key else "none is asked for")


def _clock(answer: Reached, name: str) -> Iterator[Diagnosis]:
    try:
        theirs = parsedate_to_datetime(answer.headers.get("date", ""))
    except ValueError:
        return
    ahead = time.time() - theirs.timestamp()
    if abs(ahead) < CLOCK_WARN:
        yield Diagnosis("clock", "ok", f"agrees with that of {name}")
        return
    apart = f"is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} that of {name}"
    yield Diagnosis(
        "clock", "fail" if abs(ahead) >= CLOCK_FAIL else "warn", apart, "set this machine's clock"
    )


def _model(config: Config, model: str | None, listed: Sequence[str]) -> Diagnosis:
    literal = [rule.match for rule in config.models if not set("*?[") & set(rule.match)]
    model = model or next(iter((*literal, *listed)), None)
    if model is None:
        return Diagnosis("model", "warn", "there is none to look up", "name one with --model")
    if listed and model not in listed:
        return Diagnosis(
            "model",
            "warn",
            f"no upstream lists {model}",
            f"they list {', '.join(sorted(listed)[:SHOWN])}",
        )
    stated = asyncio.run(_stated(upstream_for(config, model), model)) if config.upstreams else None
    facts = ModelRegistry(config.models).facts(
        model, settings=config.policy(), upstream_facts=stated
    )
    if facts.window is None:
        rule = f'models: [{{match: "{model}", window: 8192}}]'
        return Diagnosis(
            "model", "warn", f"nobody knows the window of {model}", f"state it in the file: {rule}"
        )
    return Diagnosis(
        "model",
        "ok",
        f"{model}, a window of {facts.window:,} tokens {SAID_BY.get(facts.source, '')}",
    )


async def _stated(upstream: UpstreamSettings, model: str) -> ModelFacts | None:

    async def fetch(url: str, body: bytes | None) -> tuple[int, bytes]:
        answer = await asyncio.to_thread(get, url, _headers(upstream), body=body)
        return answer.status, answer.body

    return await Probe().ask("", upstream.base_url, model, fetch) if upstream.base_url else None


def _store(config: Config) -> Iterator[Diagnosis]:
    kept = config.store.retention

    async def read(store: Store) -> tuple[int, str, dict[str, Any]]:
        known = [key for key in await store.list_keys() if key.revoked is None]
        return (
            len(known),
            store.schema,
            await store.counts(before=0.0 if kept is None else time.time() - kept),
        )

    file = Path(config.store.url.removeprefix(SQLITE))
    known = len(config.keys)
    if config.store.url.startswith(SQLITE) and not file.exists():
        if os.access(file.absolute().parent, os.W_OK):
            yield Diagnosis("store", "ok", f"{file} will be made")
        else:
            yield Diagnosis(
                "store",
                "fail",
                f"{file} cannot be made",
                "choose a folder that can be written (store.url)",
            )
    else:
        try:
            made, schema, counts = reading(config, read)
            writing(config, Store.ping)
        except Failure as fault:
            yield Diagnosis("store", "fail", fault.message, _mended(config, fault.message))
            return
        known += made
        held = f"{counted(counts['conversations'], 'conversation')} in {counts['bytes']:,} bytes"
        old = f", {counts['due']:,} of them older than the retention" if counts["due"] else ""
        yield Diagnosis("store", "ok", f"it can be written, schema {schema}, {held}{old}")
    if not known and config.auth.mode == "keys":
        yield Diagnosis(
            "keys", "warn", "there is none, so nobody may call", "weir keys create --name me"
        )


def _mended(config: Config, fault: str) -> str:
    if "weir db migrate" in fault:
        store = shlex.quote(masked_url(config.store.url).removeprefix(SQLITE))
        return f"weir db migrate --store {store} makes its tables"
    if "before the first release" in fault:
        return "name another file or database (--store, store.url)"
    return "check store.url, the file's owner and the free space"


def _vocabulary(model: str | None) -> Diagnosis:
    tokenizer = Tokenizer(cache_dir=vocabularies())
    counter = tokenizer.counter(model or ENCODING)
    counter.count("Weir")
    tokenizer.close()
    if counter.reason is None:
        return Diagnosis("vocabulary", "ok", f"{counter.name} counts tokens exactly")
    return Diagnosis(
        "vocabulary", "warn", f"{counter.reason}; characters are counted", "install weir-proxy anew"
    )


def _port(config: Config) -> Diagnosis:
    host = config.listen.host
    port = config.listen.port
    where = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as fault:
        if fault.errno != errno.EADDRINUSE:
            return Diagnosis(
                "port",
                "fail",
                f"{where}: {fault.strerror or fault}",
                "choose another address (listen)",
            )
        if is_weir(weir_address(None, config)):
            return Diagnosis("port", "ok", f"a Weir answers on {where}")
        return Diagnosis(
            "port", "fail", f"another program has {where}", "end it, or choose another: --port"
        )
    return Diagnosis("port", "ok", f"{where} is free")
