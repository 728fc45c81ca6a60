"""What becomes of a request's messages: recognised, planned, and after the answer prepared for the next batch."""

from proxy.planning.planner import Planner
from proxy.planning.preparation import Preparation
from proxy.planning.values import Paid, Plan, PlanRequest, Recognized

__all__ = ["Paid", "Plan", "PlanRequest", "Planner", "Preparation", "Recognized"]
