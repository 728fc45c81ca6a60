"""Names for requests."""

import itertools
import os
import secrets


class RequestIds:
    """Ids that no other request has: random per process, then counted; a process that is forked
    draws its own.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._draw()
        os.register_at_fork(after_in_child=self._draw)

    def _draw(self) -> None:
        self._process = secrets.token_hex(8)

    def new(self) -> str:
        return f"req_{self._process}{next(self._numbers):08x}"


new_request_id = RequestIds().new
