"""What one process holds while it runs; made by ``app``, given to the routes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachetools import TTLCache

from policies.settings import ContextSettings, Mode
from proxy.access.admission import Admission, AuthThrottle, Keyring, tenant_source
from proxy.access.budgets import Budgets
from proxy.access.provider_ids import ProviderIds
from proxy.config.file import ConfigError
from proxy.config.presets import SetPolicy, read_policy, with_set_policies
from proxy.config.values import Config
from proxy.effects.summarizer import Summarizer
from proxy.features.custom import CustomFunctions
from proxy.features.feature import Features
from proxy.features.health import HealthBook
from proxy.features.held_history import AnswerBook
from proxy.models.facts import ModelRegistry
from proxy.models.limits import ModelLimitsResolver
from proxy.planning.planner import Planner
from proxy.planning.preparation import Preparation
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import KeyRow, PolicyRow
from proxy.telemetry.setup import Telemetry
from proxy.upstream.client import Upstreams, unsupported_endpoints
from proxy.wire.counting import Tokenizer


@dataclass(slots=True)
class Runtime:
    """The parts of a running Weir. ``config`` and ``keyring`` are replaced as a whole on reload.

    ``without_tools`` are the scopes (origin, model, credential) whose upstream was seen to take no
    tools; ``policies`` are those that were requested, by name and mode.
    """

    config: Config
    keyring: Keyring
    secret: bytes = field(repr=False)
    registry: ModelRegistry
    limits_resolver: ModelLimitsResolver
    tokenizer: Tokenizer
    planner: Planner
    preparation: Preparation
    summarizer: Summarizer
    upstreams: Upstreams
    store: Store
    write_queue: WriteBehindQueue
    answers: AnswerBook
    provider_ids: ProviderIds
    telemetry: Telemetry
    instance: str
    admission: Admission
    budgets: Budgets
    auth_throttle: AuthThrottle = field(default_factory=AuthThrottle)
    health: HealthBook = field(default_factory=HealthBook)
    custom: CustomFunctions = field(default_factory=CustomFunctions)
    features: Features = field(default_factory=Features)
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("weir"))
    set_policies: dict[str, SetPolicy] = field(default_factory=dict)
    without_tools: set[str] = field(default_factory=set)
    without_team: set[tuple[str, str]] = field(default_factory=set)
    unsupported: TTLCache[tuple[str, str], None] = field(default_factory=unsupported_endpoints)
    sizes: Sequence[tuple[float, int]] = ()
    policies: dict[tuple[str, Mode | None], ContextSettings] = field(default_factory=dict)

    def adopt(self, config: Config) -> None:
        self.config = with_set_policies(config, self.set_policies.values())
        self.policies.clear()
        self.registry.rules = config.models
        self.features.adopt(config)

    def set_policy(self, policy: SetPolicy) -> None:
        self.set_policies[policy.name] = policy
        self.adopt(self.config)

    def take_keys(self, rows: Sequence[KeyRow]) -> None:
        config = self.config
        before = self.keyring
        mode = "keys" if config.auth.mode == "auto" and not before.is_open else config.auth.mode
        tenant = tenant_source(config.auth, config.listen)
        fresh = self.keyring = Keyring(
            config.keys,
            rows,
            secret=self.secret,
            mode=mode,
            tenant=tenant,
            teams=config.teams,
        )
        if fresh.is_open and not before.is_open:
            self.logger.warning("auth.mode is open: from now on anybody who can connect may call")
        if before.is_open and not fresh.is_open:
            said = (
                "there is a key: from now on only known keys may call; auth.mode: open would let in"
                " any other"
            )
            self.logger.warning("%s", said)
        for name, team in sorted(fresh.without_team - self.without_team):
            said = (
                f"the key {name} is of the team {team}, which is not in the configuration: it has"
                f" no team's budgets and rates; name it under teams, or weir keys set {name} --team"
            )
            self.logger.warning("%s", said)
        self.without_team = fresh.without_team
        if len(before) and not fresh.is_open and not len(fresh):
            said = (
                "no key is left: nobody may call until there is one; weir keys create --name me"
                " makes one"
            )
            self.logger.warning("%s", said)

    def take_policies(self, rows: Sequence[PolicyRow]) -> None:
        for row in rows:
            known = self.set_policies.get(row.name)
            if known is not None and (known.at >= row.at or known.text == row.document):
                continue
            body: Mapping[str, object] | None = None
            try:
                body = read_policy(row.name, row.document)
            except ConfigError as error:
                self.logger.error("the stored policy %s is not used: %s", row.name, error)
            self.set_policy(SetPolicy(row.name, row.document, row.at, body))
