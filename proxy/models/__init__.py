"""What is known about a model: its window and prices by name, and the limits that hold on one upstream."""

from proxy.models.facts import ModelFacts, ModelRegistry
from proxy.models.limits import ModelLimits, ModelLimitsResolver

__all__ = ["ModelFacts", "ModelLimits", "ModelLimitsResolver", "ModelRegistry"]
