"""What the newest calls of a request show: one that is made again and again, and how much each tool brought."""

from collections.abc import Iterator
from itertools import islice

from policies.messages import ToolCall, Transcript, same_call

LONGEST_COMPARED = 4_096
MOST_READ = 64


def repeats(transcript: Transcript, most: int) -> int:
    """How many times in a row a call of the newest step was made since the last user message, in ``most`` steps.

    Two calls are the same if they ask the same of the same tool, however that is spelt; arguments of more than 4,096
    characters are compared as they are. 0 where the request does not end with a step.
    """
    steps = list(islice(_steps(transcript), most))
    if not steps:
        return 0
    if len(steps) == 1 and len(transcript.messages[steps[0]].call_ids) == 1:
        return 1
    counts: list[tuple[ToolCall, int]] = []
    for call in transcript.read(steps[0]).calls:
        at = next((i for i, (known, _) in enumerate(counts) if _is_same(known, call)), None)
        if at is None:
            counts.append((call, 1))
        else:
            counts[at] = (call, counts[at][1] + 1)
    highest = max((count for _, count in counts), default=0)
    for index in steps[1:]:
        earlier = transcript.read(index).calls
        found = ((call, count, sum(_is_same(call, each) for each in earlier)) for call, count in counts)
        counts = [(call, count + again) for call, count, again in found if again]
        if not counts:
            break
        highest = max(highest, *(count for _, count in counts))
    return highest


def results_by_tool(transcript: Transcript, start: int) -> dict[str, tuple[int, int, int]]:
    """Number, uncalibrated tokens and largest of the tool results from message ``start`` on, by the tool's name.

    Of a longer array the newest 64 messages are read.
    """
    messages, names, found = transcript.messages, dict[str, str](), dict[str, tuple[int, int, int]]()
    for index in range(max(start, transcript.head, len(messages) - MOST_READ), len(messages)):
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


def _is_same(one: ToolCall, other: ToolCall) -> bool:
    if one.name != other.name:
        return False
    if one.arguments == other.arguments:
        return True
    if max(len(one.arguments), len(other.arguments)) > LONGEST_COMPARED:
        return False
    return same_call(one) == same_call(other)
