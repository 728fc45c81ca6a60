"""The configuration: YAML, environment and flags become one frozen ``Config``, which is checked before it is used.

``values`` says what there is, ``file`` reads it, ``loading`` puts it together and keeps a running Weir at what its
files say; a policy is made from its preset in ``presets`` and judged in ``lint``.
"""

from proxy.config.file import ConfigError
from proxy.config.loading import Handed, environment, hand_down, handed_down, load_config, public, with_policy
from proxy.config.values import (
    AlertSettings,
    Config,
    Flags,
    KeySettings,
    LimitSettings,
    ModelRule,
    Prices,
    UpstreamSettings,
    masked_url,
    secrets_of,
)

__all__ = [
    "AlertSettings",
    "Config",
    "ConfigError",
    "Flags",
    "Handed",
    "KeySettings",
    "LimitSettings",
    "ModelRule",
    "Prices",
    "UpstreamSettings",
    "environment",
    "hand_down",
    "handed_down",
    "load_config",
    "masked_url",
    "public",
    "secrets_of",
    "with_policy",
]
