"""What can go wrong while deciding, as one short tree.

::

    PolicyError
    ├── InvalidConversation      the array breaks a rule that every upstream has
    └── BudgetUnreachable        what may not be removed is already too much
"""

from collections.abc import Mapping


class PolicyError(Exception):
    """Base of everything that the pure half raises on purpose."""


class InvalidConversation(PolicyError):
    """An array of messages that an upstream would reject, and the rule that it breaks."""


class BudgetUnreachable(PolicyError):
    """The protected content alone does not fit the window.

    Attributes:
        window: context window, tokens.
        reserve: tokens kept free for the answer.
        buckets: tokens of every bucket of the smallest array that was reached.
        protected: tokens that no layer may remove.
    """

    def __init__(self, *, window: int, reserve: int, buckets: Mapping[str, int], protected: int) -> None:
        self.window = window
        self.reserve = reserve
        self.buckets = dict(buckets)
        self.protected = protected
        super().__init__(
            f"protected content of {protected} tokens does not fit a window of {window} with {reserve} reserved"
        )
