"""What one process holds while it runs; made by ``app``, given to the routes."""

import logging
from dataclasses import dataclass, field, replace

from policies import ContextSettings, Mode
from proxy.config import Config
from proxy.keys import Keyring
from proxy.models import ModelRegistry
from proxy.planning import Planner
from proxy.settle import Settler
from proxy.store import Store
from proxy.summarizer import Summarizer
from proxy.telemetry import Telemetry
from proxy.tokenizer import Tokenizer
from proxy.upstream.upstreams import Upstreams
from proxy.windows import Windows


@dataclass(slots=True)
class Runtime:
    """The parts of a running Weir. ``config`` and ``keyring`` are replaced as a whole on reload."""

    config: Config
    keyring: Keyring
    secret: bytes = field(repr=False)
    registry: ModelRegistry
    windows: Windows
    tokenizer: Tokenizer
    planner: Planner
    summarizer: Summarizer
    upstreams: Upstreams
    store: Store | None
    settler: Settler
    telemetry: Telemetry
    instance: str
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("weir"))
    _policies: dict[tuple[str, Mode | None], ContextSettings] = field(default_factory=dict)

    def policy(self, name: str, mode: Mode | None = None) -> ContextSettings:
        """A policy by name, in another mode if one is given; the same object every time. KeyError if unknown."""
        key = (name, mode)
        settings = self._policies.get(key)
        if settings is None:
            settings = self.config.policy(name)
            settings = settings if mode is None else replace(settings, mode=mode)
            self._policies[key] = settings
        return settings

    def adopt(self, config: Config) -> None:
        """Go on with another configuration: keys, policies and models at once, listener and store as they were."""
        self.config = config
        self._policies.clear()
        self.registry.replace_rules(config.models)
