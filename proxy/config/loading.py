"""YAML, environment and flags as one frozen ``Config``, and what changes of it while Weir runs.

Flags override the environment, which only this module reads; that overrides the file, and that the
defaults in ``values``. Everything is checked before it is used: ``load_config`` returns a whole
``Config`` or raises ``ConfigError``.

Files are looked at every two seconds, and at once on SIGHUP. What is read anew holds from the next
request on; what cannot be read leaves the old configuration in force and is reported once, with
file and line. Listener, store, telemetry and limits stay as they were at the start.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import SecretStr

from policies.settings import ContextSettings
from proxy.config.file import ConfigError, Document, KeyPath, nearest, read_document, typed
from proxy.config.presets import (
    Stamps,
    policies_in,
    policy_from,
    policy_warnings,
    preset_documents,
    preset_paths,
    preset_policies,
    stamped,
)
from proxy.config.values import Config, FileValues, Flags, UpstreamSettings
from proxy.store.chain import OPERATOR, AuditEvent, AuditType, digest_of

_OPEN_DOOR = (
    "{} is not loopback and auth.mode is open: anybody could spend your keys; say auth.mode: keys "
    "(WEIR_AUTH_MODE=keys, --auth-mode keys) and make keys, or auth.open_beyond_loopback: true "
    "(WEIR_OPEN_BEYOND_LOOPBACK=true)"
)
_KEYS = "WEIR_KEYS"


_FILE = "_FILE"


class _Environment(Mapping[str, str]):
    """The process's variables. What is absent is read from the file that ``NAME_FILE`` names."""

    def __getitem__(self, name: str) -> str:
        file = os.environ.get(name + _FILE)
        if not file or os.environ.get(name):
            return os.environ[name]
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(
                f"{name}{_FILE}: cannot read {file} ({why}); name a file that holds the value of"
                f" {name} and nothing else, and that this user may read"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)


def environment() -> Mapping[str, str]:
    """The variables that a configuration reads; of each, ``NAME_FILE`` is a file with its value.

    Raises:
        ConfigError: when a value is looked up whose file cannot be read.
    """
    return _Environment()


def load_config(
    path: Path | None = None, *, env: Mapping[str, str], flags: Flags = Flags()
) -> Config:
    """The effective configuration.

    Args:
        path: the YAML file; else ``WEIR_CONFIG`` of ``env``; else there is none.
        env: variables by name; an empty one counts as absent.
        flags: what the command line said.

    Raises:
        ConfigError: with every fault found, each with its place, path and the nearest known name.
    """
    named = path or (Path(env["WEIR_CONFIG"]) if env.get("WEIR_CONFIG") else None)
    document = read_document(named, env=env) if named is not None else Document(name="")
    document = _with_keys(document.overlaid(_overlay(env, flags)), env)
    upstream = (
        ("--upstream", flags.upstream)
        if flags.upstream
        else ("WEIR_UPSTREAM", env.get("WEIR_UPSTREAM"))
    )
    simulate = named is None and not upstream[1] and not env.get("OPENAI_API_KEY")
    if upstream[1]:
        document = _in_front_of(document, upstream, env)
    elif not simulate and not document.data.get("upstreams"):
        document = document.overlaid(
            _upstream_values("openai", ("default", "https://api.openai.com/v1"), env)
        )
    file = typed(FileValues, document)
    policies, problems = _policies(document)
    problems += [
        document.problem(at, text) for at, text in _faults(file, {*policies, *file.policies})
    ]
    if problems:
        raise ConfigError(*problems)
    made = {each.name: getattr(file, each.name) for each in dataclasses.fields(file)}
    made["upstreams"] = {
        name: dataclasses.replace(each, name=name) for name, each in file.upstreams.items()
    }
    made["auth"] = dataclasses.replace(file.auth, mode=_mode(file))
    if file.summarizer == "none":
        made["summarizer"] = None
    return Config(
        **made | {"policies": policies},
        path=named,
        simulate=simulate,
        from_files=policies,
        warnings=tuple(_warnings(file, policies)),
        places=document.places,
    )


_SOURCES: Mapping[KeyPath, tuple[str, str]] = {
    ("store", "url"): ("WEIR_STORE", "store"),
    ("default_policy",): ("WEIR_POLICY", "policy"),
    ("listen", "host"): ("WEIR_HOST", "host"),
    ("listen", "port"): ("WEIR_PORT", "port"),
    ("public_url",): ("WEIR_PUBLIC_URL", ""),
    ("window",): ("WEIR_WINDOW", "window"),
    ("summarizer",): ("WEIR_SUMMARIZER", "summarizer"),
    ("auth", "mode"): ("WEIR_AUTH_MODE", "auth_mode"),
    ("auth", "tenant"): ("WEIR_AUTH_TENANT", ""),
    ("auth", "open_beyond_loopback"): ("WEIR_OPEN_BEYOND_LOOPBACK", ""),
    ("auth", "admin_token"): ("WEIR_ADMIN_TOKEN", ""),
    ("limits", "drain"): ("WEIR_DRAIN", ""),
    ("telemetry", "otlp_endpoint"): ("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
    ("telemetry", "otlp_protocol"): ("OTEL_EXPORTER_OTLP_PROTOCOL", ""),
    ("telemetry", "service_name"): ("OTEL_SERVICE_NAME", ""),
}
"""What overrides the file: the variable and, before that, the flag for a value; empty where there
is none.
"""


def _overlay(env: Mapping[str, str], flags: Flags) -> dict[KeyPath, tuple[str, object]]:
    values: dict[KeyPath, tuple[str, object]] = {}
    for path, (variable, flag) in _SOURCES.items():
        if flag and (value := getattr(flags, flag)) is not None:
            values[path] = (f"--{flag.replace('_', '-')}", value)
        elif env.get(variable):
            values[path] = (variable, env[variable])
    return values


def _with_keys(document: Document, env: Mapping[str, str]) -> Document:
    own = document.data.get("keys") or []
    if not env.get(_KEYS) or not isinstance(own, list):
        return document
    pairs = [each.strip().partition("=") for each in env[_KEYS].split(",") if each.strip()]
    if any(not name or not secret for name, _, secret in pairs):
        raise ConfigError(f"{_KEYS}: should look like name=secret,name2=secret2")
    made = [{"name": name, "secret": secret} for name, _, secret in pairs]
    places: dict[KeyPath, str] = {("keys", len(own) + at): _KEYS for at in range(len(made))}
    return dataclasses.replace(
        document,
        data={**document.data, "keys": [*own, *made]},
        places={**document.places, **places},
    )


def _upstream_values(
    name: str, base: tuple[str, object], env: Mapping[str, str]
) -> dict[KeyPath, tuple[str, object]]:
    values: dict[KeyPath, tuple[str, object]] = {("upstreams", name, "base_url"): base}
    if env.get("OPENAI_API_KEY"):
        values[("upstreams", name, "api_key")] = ("OPENAI_API_KEY", env["OPENAI_API_KEY"])
    return values


def _in_front_of(document: Document, base: tuple[str, object], env: Mapping[str, str]) -> Document:
    """The document with one upstream instead of the file's, whose keys never go to another
    address.
    """
    models = document.data.get("models")
    rules: dict[KeyPath, tuple[str, object]] = {("upstreams",): (base[0], {})}
    if isinstance(models, list):
        kept = [
            {k: v for k, v in rule.items() if k != "upstream"} if isinstance(rule, dict) else rule
            for rule in models
        ]
        document = dataclasses.replace(document, data={**document.data, "models": kept})
    return document.overlaid(rules).overlaid(_upstream_values("default", base, env))


def _policies(document: Document) -> tuple[dict[str, ContextSettings], list[str]]:
    problems: list[str] = []
    made = dict(preset_policies())
    for name, own in policies_in(document).items():
        try:
            made[name] = policy_from(name, own, presets=preset_documents(), at=("policies", name))
        except ConfigError as fault:
            problems.extend(fault.problems)
    return made, problems


def _mode(file: FileValues) -> Literal["auto", "open", "keys"]:
    """``auto`` where only the store knows: open until a key is made there."""
    if file.auth.mode != "auto":
        return file.auth.mode
    return (
        "keys"
        if file.keys or not (file.listen.loopback or file.auth.open_beyond_loopback)
        else "auto"
    )


def _faults(file: FileValues, policies: Collection[str]) -> Iterator[tuple[KeyPath, str]]:
    for name, upstream in file.upstreams.items():
        for inner, text in _upstream_faults(upstream):
            yield ("upstreams", name, *inner), text
    for at, rule in enumerate(file.models):
        yield from _missing(("models", at, "upstream"), rule.upstream, file.upstreams.keys())
    names: list[str] = []
    secrets: list[SecretStr] = []
    for at, key in enumerate(file.keys):
        if key.name in names:
            yield ("keys", at, "name"), f"a second key is called {key.name}"
        if key.secret in secrets:
            yield ("keys", at, "secret"), "another key has the same secret"
        yield from _missing(("keys", at, "policy"), key.policy, policies)
        yield from _missing(("keys", at, "team"), key.team, file.teams.keys())
        names.append(key.name)
        secrets.append(key.secret)
    yield from _missing(("default_policy",), file.default_policy, policies)
    if _mode(file) == "open" and not file.listen.loopback and not file.auth.open_beyond_loopback:
        yield ("listen", "host"), _OPEN_DOOR.format(file.listen.host)


def _missing(
    at: KeyPath, name: str | None, known: Collection[str]
) -> Iterator[tuple[KeyPath, str]]:
    if name is not None and name not in known:
        kind = at[-1] if at[-1] in ("upstream", "team") else "policy"
        hint = nearest(name, sorted(known)) or f"; name it under {kind}s"
        yield at, f"no {kind} {name}{hint}"


def _upstream_faults(upstream: UpstreamSettings) -> Iterator[tuple[KeyPath, str]]:
    if upstream.kind == "openai":
        if upstream.base_url is None:
            yield (), "kind openai needs base_url, for example https://api.openai.com/v1"
        if upstream.api_base is not None:
            yield ("api_base",), "belongs to kind litellm"
        return
    if upstream.provider is None:
        yield (), "kind litellm needs provider, for example provider: anthropic"
    if upstream.base_url is not None:
        yield ("base_url",), "kind litellm takes api_base"
    if upstream.auth is not None:
        yield ("auth",), "kind litellm sends the key as the provider wants it"


def _warnings(file: FileValues, policies: Mapping[str, ContextSettings]) -> Iterator[str]:
    for name, upstream in file.upstreams.items():
        if upstream.base_url and urlsplit(upstream.base_url).path in {"", "/"}:
            yield f"upstreams.{name}.base_url has no path; most servers want /v1 at its end"
    named = (*file.policies, file.default_policy, *(key.policy for key in file.keys if key.policy))
    for name in dict.fromkeys(named):
        yield from (f"policies.{name}: {text}" for text in policy_warnings(policies[name]))


log = logging.getLogger("weir.reload")

WATCH_EVERY = 2.0
SETTLE = 0.1
_FIXED = ("listen", "telemetry", "limits")


def without_set_policy(config: Config, name: str) -> Config:
    """The configuration with the file's policy of that name, or the preset, or none of that
    name.
    """
    policies = {each: settings for each, settings in config.policies.items() if each != name}
    if name in config.from_files:
        policies[name] = config.from_files[name]
    return dataclasses.replace(config, policies=policies)


def overridden(config: Config) -> Iterator[str]:
    for name, settings in config.from_files.items():
        if config.policies.get(name) != settings:
            place = config.places.get(("policies", name))
            of = f"the one in {place}" if place is not None else "the preset of that name"
            yield (
                f"the policy {name} that was set over HTTP stands above {of}; DELETE"
                f" /weir/policies/{name} removes it"
            )


def stamps(config: Config) -> Stamps:
    """What shows that a file was rewritten, for the configuration's file and every preset."""
    return stamped(path for path in (config.path, *preset_paths()) if path is not None)


def as_far_as_possible(old: Config, fresh: Config) -> tuple[Config, tuple[str, ...]]:
    """The new configuration with restart-only values unchanged, and the names of those that would
    have changed.
    """
    kept: list[str] = [name for name in _FIXED if getattr(old, name) != getattr(fresh, name)]
    store = dataclasses.replace(fresh.store, url=old.store.url, content=old.store.content)
    if store != fresh.store:
        kept.append("store")
    made = dataclasses.replace(
        fresh, listen=old.listen, telemetry=old.telemetry, limits=old.limits, store=store
    )
    ours, theirs = (
        {k: u for k, u in each.upstreams.items() if u.kind == "litellm"} for each in (old, fresh)
    )
    if ours != theirs:
        kept.append("upstreams of kind litellm")
        made = dataclasses.replace(made, upstreams=old.upstreams, models=old.models)
    return made, tuple(kept)


def changes(old: Config, new: Config, *, at: float) -> Iterator[AuditEvent]:
    """Audit entries for changed policies, keys and default: digests, and no secret."""
    for name in sorted(old.policies.keys() | new.policies.keys()):
        before = old.policies.get(name)
        after = new.policies.get(name)
        if before != after:
            facts: dict[str, object] = {
                "change": "removed" if after is None else "read",
                "policy": name,
            }
            facts["document"] = None if after is None else digest_of(repr(after))
            yield _change(AuditType.POLICY_CHANGE, facts, at)
    if old.default_policy != new.default_policy:
        yield _change(
            AuditType.POLICY_CHANGE,
            {"change": "default", "policy": "", "default": new.default_policy},
            at,
        )
    known, fresh = ({key.name: key for key in config.keys} for config in (old, new))
    for name in sorted(known.keys() | fresh.keys()):
        mine = known.get(name)
        now = fresh.get(name)
        if mine != now:
            own = (
                {}
                if now is None
                else {"policy": now.policy, "models": len(now.models), "allow": sorted(now.allow)}
            )
            other = mine is not None and now is not None and mine.secret != now.secret
            facts = {
                "change": "removed" if now is None else "read",
                "key": name,
                "another_secret": other,
            }
            yield _change(AuditType.KEY_CHANGE, facts | own, at)


def _change(kind: AuditType, facts: Mapping[str, object], at: float) -> AuditEvent:
    return AuditEvent(tenant=OPERATOR, at=at, type=kind, facts={**facts, "source": "file"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    current: Callable[[], Config]
    read: Callable[[], Config]
    adopt: Callable[[Config], Awaitable[None]]
    every: float = WATCH_EVERY
    _asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def ask(self) -> None:
        self._asked.set()

    async def watch(self) -> None:
        seen = await asyncio.to_thread(stamps, self.current())
        self._say_overridden()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.every):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            now = await asyncio.to_thread(stamps, self.current())
            if now == seen and not asked:
                continue
            while not asked and now != seen:  # somebody may still be writing
                seen = now
                await asyncio.sleep(SETTLE)
                now = await asyncio.to_thread(stamps, self.current())
            seen = now
            await self.once()

    async def once(self) -> bool:
        old = self.current()
        try:
            fresh = await asyncio.to_thread(self.read)
            read = [
                any(at.startswith(f"{each.path}:") for at in each.places.values())
                for each in (old, fresh)
            ]
            # as on a full disk: the defaults would send clients' content to another upstream
            if read == [True, False]:
                raise ConfigError(f"{fresh.path}: is empty")  # noqa: TRY301 - said like any other fault
        except (ConfigError, OSError) as error:
            log.error("the new configuration is not used, the old one stays in force: %s", error)
            return False
        fresh, kept = as_far_as_possible(old, fresh)
        await self.adopt(fresh)
        log.info("the configuration was read anew")
        for name in kept:
            log.warning(
                "%s changed in the configuration: that needs a restart, the old value stays in"
                " force",
                name,
            )
        for warning in fresh.warnings:
            if warning not in old.warnings:
                log.warning("%s", warning)
        self._say_overridden()
        return True

    def _say_overridden(self) -> None:
        for text in overridden(self.current()):
            log.warning("%s", text)


@contextlib.asynccontextmanager
async def reloading(reload: Reload) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    # not by the loop's own function: after it removes a handler, SIGHUP ends the process until
    # another is set
    before = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(reload.ask))
    watching = asyncio.create_task(reload.watch(), name="weir-reload")
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
