"""Who is calling."""

import fnmatch
from dataclasses import dataclass, field

from proxy.errors import ModelNotAllowed

TENANT_SHOWN = 8
"""Digits of a tenant's hash in logs and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key's owner.

    Attributes:
        tenant: separates this caller's conversations from all others; 32 hex digits.
        name: the key's name, None for a key that Weir does not know (mode ``open``).
        policy: the policy the key is bound to, None for the default.
        models: shell patterns of the models it may use; none means all.
        allow: which of Weir's headers it may send: ``policy``, ``mode``; ``relay`` is for routes that name no model.
        credential: what goes upstream where the upstream says ``pass``; empty for keys that Weir made.
    """

    tenant: str
    name: str | None = None
    policy: str | None = None
    models: tuple[str, ...] = ()
    allow: frozenset[str] = frozenset()
    credential: bytes = field(default=b"", repr=False)

    @property
    def is_restricted(self) -> bool:
        """Whether there are models that the key may not use."""
        return bool(self.models) and "*" not in self.models

    def allows(self, model: str) -> bool:
        """Whether the key may use ``model``."""
        return not self.models or any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def require(self, model: str) -> None:
        """Nothing, or ModelNotAllowed; LiteLLM takes several with commas between: each has to be allowed."""
        if not all(self.allows(each.strip()) for each in model.split(",")):
            raise ModelNotAllowed(f"this key may not use the model {model[:200]!r}", param="model")
