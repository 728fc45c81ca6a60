"""What changes while Weir runs: the configuration's file, the presets, and policies that were set over HTTP.

Files are looked at every two seconds, and at once on SIGHUP. What is read anew holds from the next request on; what
cannot be read leaves the old configuration in force and is said once, with file and line. Listener, store, telemetry
and limits stay as they were at the start.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

from policies.settings import ContextSettings
from proxy.config.file import MAX_DEPTH, ConfigError, parse_document, read_document
from proxy.config.loading import environment, with_policy
from proxy.config.presets import policy_from, preset_directory, preset_documents, preset_policies
from proxy.config.values import Config
from proxy.store.chain import OPERATOR, AuditEvent, AuditType, digest_of
from proxy.wire.raw import nests_beyond

log = logging.getLogger("weir.reload")

WATCH_EVERY = 2.0
SETTLE = 0.1
_FIXED = ("listen", "telemetry", "limits")

Stamp = tuple[str, int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class SetPolicy:
    """A policy that was set while Weir ran: the text as it was given, when, and what it says.

    ``body`` is None for one that cannot be read, and for one that was removed again.
    """

    name: str
    text: str
    at: float
    body: Mapping[str, object] | None


def read_policy(name: str, text: str) -> Mapping[str, object]:
    """The keys of a policy written as JSON or YAML; ConfigError. Variables of the environment are not read."""
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: should be a mapping of keys to values")
        if not nests_beyond(text.encode(), MAX_DEPTH):
            return data
    return parse_document(text, name=name, env={}).data


def with_set_policies(config: Config, policies: Iterable[SetPolicy]) -> Config:
    """The configuration with policies that were set over HTTP; one that no longer holds is left out and said."""
    for policy in policies:
        if policy.body is None:
            continue
        try:
            config = with_policy(config, policy.name, policy.body)
        except ConfigError as error:
            log.error("the policy %s that was set over HTTP is not used: %s", policy.name, error)
    return config


def beneath(config: Config, name: str) -> ContextSettings | None:
    """The policy of that name in the configuration's file, else the preset; None if there is neither. ConfigError."""
    if config.path is not None and ("policies", name) in config.places:
        document = read_document(config.path, env=environment())
        bodies = document.data.get("policies")
        body = bodies.get(name) if isinstance(bodies, Mapping) else None
        own = dataclasses.replace(document, data=body if isinstance(body, Mapping) else {})
        return policy_from(name, own, presets=preset_documents(), at=("policies", name))
    return preset_policies().get(name)


def without_set_policy(config: Config, name: str) -> Config:
    """The configuration with the file's policy of that name, or the preset, or none of that name. ConfigError."""
    there = beneath(config, name)
    policies = {each: settings for each, settings in config.policies.items() if each != name}
    return dataclasses.replace(config, policies=policies if there is None else {**policies, name: there})


def overridden(config: Config) -> Iterator[str]:
    """A line for each policy that was set over HTTP and stands above another one of the file's or above a preset."""
    for name, settings in config.policies.items():
        try:
            there = beneath(config, name)
        except ConfigError:
            continue  # the file is being written; what holds was said when it was read
        if there is not None and there != settings:
            place = config.places.get(("policies", name))
            of = f"the one in {place}" if place is not None else "the preset of that name"
            yield f"the policy {name} that was set over HTTP stands above {of}; DELETE /weir/policies/{name} removes it"


def stamps(config: Config) -> tuple[Stamp, ...]:
    """What tells that a file was written anew, for the configuration's file and every preset."""
    paths = [*([config.path] if config.path is not None else []), *sorted(preset_directory().glob("*.yaml"))]
    return tuple(_stamps(paths))


def _stamps(paths: Iterable[Path]) -> Iterator[Stamp]:
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            yield str(path), stat.st_mtime_ns, stat.st_ino, stat.st_size


def as_far_as_possible(old: Config, fresh: Config) -> tuple[Config, tuple[str, ...]]:
    """The new configuration with what can only change with a restart as it was, and what of that would have changed."""
    kept: list[str] = [name for name in _FIXED if getattr(old, name) != getattr(fresh, name)]
    store = dataclasses.replace(fresh.store, url=old.store.url, content=old.store.content)
    if store != fresh.store:
        kept.append("store")
    made = dataclasses.replace(fresh, listen=old.listen, telemetry=old.telemetry, limits=old.limits, store=store)
    if _through_a_library(old) != _through_a_library(fresh):
        kept.append("upstreams of kind litellm")
        made = dataclasses.replace(made, upstreams=old.upstreams, models=old.models)
    return made, tuple(kept)


def _through_a_library(config: Config) -> dict[str, object]:
    return {name: upstream for name, upstream in config.upstreams.items() if upstream.kind == "litellm"}


def changes(old: Config, new: Config, *, at: float) -> Iterator[AuditEvent]:
    """What the audit says of policies, keys and the default that are others than before: digests, and no secret."""
    for name in sorted(old.policies.keys() | new.policies.keys()):
        before, after = old.policies.get(name), new.policies.get(name)
        if before != after:
            facts: dict[str, object] = {"change": "removed" if after is None else "read", "policy": name}
            yield _change(AuditType.POLICY_CHANGE, facts | {"document": _digest(after)}, at)
    if old.default_policy != new.default_policy:
        yield _change(AuditType.POLICY_CHANGE, {"change": "default", "policy": "", "default": new.default_policy}, at)
    known, fresh = ({key.name: key for key in config.keys} for config in (old, new))
    for name in sorted(known.keys() | fresh.keys()):
        mine, now = known.get(name), fresh.get(name)
        if mine != now:
            own = {} if now is None else {"policy": now.policy, "models": len(now.models), "allow": sorted(now.allow)}
            other = mine is not None and now is not None and mine.secret != now.secret
            facts = {"change": "removed" if now is None else "read", "key": name, "another_secret": other}
            yield _change(AuditType.KEY_CHANGE, facts | own, at)


def _change(kind: AuditType, facts: Mapping[str, object], at: float) -> AuditEvent:
    return AuditEvent(tenant=OPERATOR, at=at, type=kind, facts={**facts, "source": "file"})


def _digest(settings: ContextSettings | None) -> str | None:
    """SHA-256 of a policy with every default in it, None for none."""
    return None if settings is None else digest_of(repr(settings))


class Reload:
    """Keeps a running Weir at what its files say."""

    def __init__(
        self,
        *,
        current: Callable[[], Config],
        read: Callable[[], Config],
        adopt: Callable[[Config], Awaitable[None]],
        every: float = WATCH_EVERY,
    ) -> None:
        self._current = current
        self._read = read
        self._adopt = adopt
        self._every = every
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have it read now."""
        self._asked.set()

    async def watch(self) -> None:
        """Read anew whenever a file changes or somebody asks; never returns."""
        seen = await asyncio.to_thread(stamps, self._current())
        await self._say_overridden()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._every)
            asked = self._asked.is_set()
            self._asked.clear()
            now = await asyncio.to_thread(stamps, self._current())
            if now == seen and not asked:
                continue
            if not asked:
                await asyncio.sleep(SETTLE)  # an editor may still be writing
                now = await asyncio.to_thread(stamps, self._current())
            seen = now
            await self.once()

    async def once(self) -> bool:
        """Read and adopt; False if what was read is not valid."""
        old = self._current()
        try:
            fresh = await asyncio.to_thread(self._read)
        except (ConfigError, OSError) as error:
            log.error("the new configuration is not used, the old one stays in force: %s", error)
            return False
        fresh, kept = as_far_as_possible(old, fresh)
        await self._adopt(fresh)
        log.info("the configuration was read anew")
        for name in kept:
            log.warning("%s changed in the configuration: that needs a restart, the old value stays in force", name)
        for warning in fresh.warnings:
            if warning not in old.warnings:
                log.warning("%s", warning)
        await self._say_overridden()
        return True

    async def _say_overridden(self) -> None:
        for text in await asyncio.to_thread(lambda: tuple(overridden(self._current()))):
            log.warning("%s", text)


@contextlib.asynccontextmanager
async def reloading(reload: Reload | None) -> AsyncIterator[None]:
    """While it lasts, files are watched, and SIGHUP reads them at once."""
    if reload is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload.ask)
    watching = asyncio.create_task(reload.watch(), name="weir-reload")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
