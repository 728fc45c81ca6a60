"""What upstreams do not have: endpoints and routes, as their own answers say, remembered for a time."""

import time
from collections.abc import Callable

from proxy.wire.raw import read_value

LACKING_FOR = 600.0
MAX_LACKING = 1_000
_SAYS_NOTHING_ELSE = frozenset({"not found", "file not found", "resource not found"})
"""All that Anthropic, llama.cpp, FastAPI and Azure say where nothing is at an address; of a model they name it."""


def has_no_route(status: int, body: bytes, path: str) -> bool:
    """Whether an answer says that nothing is at ``path``, and not that a model or a stored answer is missing.

    405 says so (RFC 9110, 15.5.6). A 404 does where its body is not the error of an API, where the error names the
    route (OpenAI: "Invalid URL (POST /v1/…)") or nothing at all. Whatever speaks of a model is about that.
    """
    if status != 404:
        return status == 405
    try:
        value = read_value(body)
    except ValueError:
        value = None
    error = value.get("error", value.get("detail", value.get("message"))) if isinstance(value, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    text = (said if isinstance(said, str) else body.decode("utf-8", "replace")).lower()
    if "model" in text:
        return False
    return not isinstance(said, str) or text.strip(" .!") in _SAYS_NOTHING_ELSE or path in text


class Lacking:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.until: dict[tuple[str, str], float] = {}

    def __contains__(self, what: tuple[str, str]) -> bool:
        return self.until.get(what, 0.0) > self._clock()

    def add(self, upstream: str, what: str) -> None:
        if len(self.until) >= MAX_LACKING:
            self.until.clear()
        self.until[upstream, what] = self._clock() + LACKING_FOR

    def discard(self, upstream: str, what: str) -> None:
        self.until.pop((upstream, what), None)
