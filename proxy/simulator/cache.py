"""A prefix cache such as providers have: what an earlier request began with is not paid for again."""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from proxy.simulator.window import Prompt


class PrefixCache:
    """Remembers the piece prefixes of past requests by credential and model, least recently used out first."""

    def __init__(self, *, entries: int, minimum: int = 0) -> None:
        self._entries = entries
        self._minimum = minimum
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def cached_tokens(self, prompt: Prompt, *, credential: str, model: str) -> int:
        """Tokens of the longest leading run of pieces that an earlier request of the same owner began with."""
        tokens = 0
        for key, size in zip(_chain(prompt, credential, model), prompt.tokens, strict=True):
            if key not in self._seen:
                break
            tokens += size
        return tokens if tokens >= self._minimum else 0

    def remember(self, prompt: Prompt, *, credential: str, model: str) -> None:
        """Make every prefix of ``prompt`` a hit for later requests."""
        for key in _chain(prompt, credential, model):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as a provider does after some idle minutes."""
        self._seen.clear()


def _chain(prompt: Prompt, credential: str, model: str) -> Iterator[bytes]:
    key = blake2b(f"{credential}\n{model}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for digest in prompt.digests:
        key = blake2b(key + digest, digest_size=16).digest()
        yield key
