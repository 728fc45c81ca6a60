"""The pure half of Weir: deciding what a request may carry. Standard library only; no clock, no IO."""

from policies.decision import Action, Decision
from policies.draft import standing
from policies.effects import Done, Effect, Failed, Flow, Offload, Reply, Summarize, Summary
from policies.ledger import ConversationState, Cut, Edit, EditKind, PlannedMessage
from policies.limits import BucketExceeded, BudgetUnreachable, TokenBudget, divide
from policies.memory.state import milestone_of, notes_of, state_of, wants_notes, write_notes
from policies.messages import Body, InvalidConversation, Message, PolicyError, ToolCall, Transcript
from policies.planner import compacted, plan, trim
from policies.preparing import is_soft, prepare
from policies.pressure import WindowPressure
from policies.settings import ClientEdits, ContextSettings, Mode
from policies.strategies.layers import STRATEGIES
from policies.strategies.recall import Elsewhere, Pages
from policies.tokens import TokenCounter

__all__ = [
    "STRATEGIES",
    "Action",
    "Body",
    "BucketExceeded",
    "BudgetUnreachable",
    "ClientEdits",
    "ContextSettings",
    "ConversationState",
    "Cut",
    "Decision",
    "Done",
    "Edit",
    "EditKind",
    "Effect",
    "Elsewhere",
    "Failed",
    "Flow",
    "InvalidConversation",
    "Message",
    "Mode",
    "Offload",
    "Pages",
    "PlannedMessage",
    "PolicyError",
    "Reply",
    "Summarize",
    "Summary",
    "TokenBudget",
    "TokenCounter",
    "ToolCall",
    "Transcript",
    "WindowPressure",
    "compacted",
    "divide",
    "is_soft",
    "milestone_of",
    "notes_of",
    "plan",
    "prepare",
    "standing",
    "state_of",
    "trim",
    "wants_notes",
    "write_notes",
]
