"""What can go wrong while deciding, as one short tree.

::

    PolicyError
    ├── InvalidConversation      the array breaks a rule that every upstream has
    └── BudgetUnreachable        what may not be removed is already too much
        └── BucketExceeded       a bucket is above its cap, and the policy says to refuse that
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


class BucketExceeded(BudgetUnreachable):
    """A bucket is above its cap and its ``on_overflow`` is ``reject``.

    Attributes:
        bucket: its name.
        used: its tokens.
        cap: the most that it may hold, tokens.
    """

    def __init__(
        self, bucket: str, *, used: int, cap: int, window: int, reserve: int, buckets: Mapping[str, int], protected: int
    ) -> None:
        super().__init__(window=window, reserve=reserve, buckets=buckets, protected=protected)
        self.bucket = bucket
        self.used = used
        self.cap = cap
        self.args = (f"bucket {bucket} holds {used} tokens, {used - cap} more than its cap of {cap}",)
