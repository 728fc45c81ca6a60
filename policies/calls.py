"""What the newest calls of a request show: one that is made again and again, and how much each tool brought."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from policies.messages import HASH_SIZE, ToolCall, Transcript, same_call

Counted = tuple[tuple[str, str, int], ...]

MAX_KEPT_LEN = 512
MAX_READ = 64


class Run(NamedTuple):
    """The calls of a conversation's newest step: tool, arguments, and how many times in a row it was called so.

    ``end`` is the chain's hash at the end of the array that it was read from. Of arguments that are longer than 512
    characters only a hash is kept.
    """

    end: bytes = b""
    calls: Counted = ()

    @property
    def longest(self) -> int:
        """How many times in a row the call was made that was made most; 0 without one since the last user message."""
        return max([count for _, _, count in self.calls]) if self.calls else 0


def follow_calls(transcript: Transcript, run: Run, *, length: int, most: int) -> Run:
    """The run after a request whose first ``length`` messages behind the head are known.

    Where ``run`` is not of those, the newest ``most`` steps are read instead. A user message ends every run: somebody
    has seen what came of it.
    """
    chain, messages = transcript.chain, transcript.messages
    known = 0 < length <= len(chain) and chain[length - 1] == run.end
    if known:
        calls, start = run.calls, transcript.head + length
    else:
        calls, start = (), min(islice(_steps(transcript), most), default=len(messages))
    for index in range(start, len(messages)):
        message = messages[index]
        if message.call_ids:
            calls = _next(calls, transcript.read(index).calls)
        elif message.role == "user":
            calls = ()
    return Run(chain[-1] if chain else b"", calls)


def results_by_tool(transcript: Transcript, start: int) -> dict[str, tuple[int, int, int]]:
    """Number, uncalibrated tokens and largest of the tool results from message ``start`` on, by the tool's name.

    Of a longer array the newest 64 messages are read.
    """
    messages, names, found = transcript.messages, dict[str, str](), dict[str, tuple[int, int, int]]()
    for index in range(max(start, transcript.head, len(messages) - MAX_READ), len(messages)):
        message = messages[index]
        if message.call_ids:
            names |= {call.id: call.name for call in transcript.read(index).calls}
        elif message.is_result and (name := names.get(message.answers or "")) is not None:
            number, tokens, largest = found.get(name, (0, 0, 0))
            found[name] = (number + 1, tokens + message.tokens, max(largest, message.tokens))
    return found


def _steps(transcript: Transcript) -> Iterator[int]:
    """Indices of the messages with calls since the last user message, the newest first."""
    messages = transcript.messages
    for index in range(len(messages) - 1, transcript.head - 1, -1):
        if messages[index].call_ids:
            yield index
        elif messages[index].role == "user":
            return


def _next(before: Counted, made: tuple[ToolCall, ...]) -> Counted:
    """The calls of one more step, each counted on from the step before."""
    found: list[tuple[str, str, int]] = []
    for call in made:
        name, arguments = call.name, _kept(call.arguments)
        for at, known in enumerate(found):
            if _is_same(known, name, arguments):
                found[at] = (name, arguments, known[2] + 1)
                break
        else:
            count = next((known[2] for known in before if _is_same(known, name, arguments)), 0)
            found.append((name, arguments, count + 1))
    return tuple(found)


def _kept(arguments: str) -> str:
    if len(arguments) <= MAX_KEPT_LEN:
        return arguments
    return blake2b(arguments.encode("utf-8", "surrogatepass"), digest_size=HASH_SIZE).hexdigest()


def _is_same(known: tuple[str, str, int], name: str, arguments: str) -> bool:
    """Whether two calls ask the same of the same tool; JSON is compared as such, if it has the same letters at all."""
    if known[0] != name:
        return False
    if known[1] == arguments:
        return True
    if sorted(known[1].replace(" ", "")) != sorted(arguments.replace(" ", "")):
        return False
    return same_call(ToolCall("", name, known[1])) == same_call(ToolCall("", name, arguments))
