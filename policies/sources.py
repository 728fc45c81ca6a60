"""Messages as what can be read in them: for an extract, for the state of a task, for a summariser."""

from collections.abc import Mapping, Sequence

from policies.messages import ToolCall, Transcript
from policies.summary import MaterialLine
from policies.text.segments import Source


def sources_of(transcript: Transcript, indices: Sequence[int], calls: Mapping[int, ToolCall]) -> list[Source]:
    """These messages in order; ``calls`` are the calls that tool results answer, by the result's index."""
    messages = transcript.messages
    found: list[Source] = []
    for index in indices:
        body, call, message = transcript.read(index), calls.get(index), messages[index]
        found.append(
            Source(
                position=index,
                role="tool" if message.is_result else message.role,
                text=body.text,
                tool=call.name if call else "",
                arguments=call.arguments if call else "",
                tokens=message.tokens,
                ref=message.ref,
                calls=body.calls,
            )
        )
    return found


def lines_of(sources: Sequence[Source]) -> list[MaterialLine]:
    """What was said, each line with its origin: what a summariser reads."""
    lines: list[MaterialLine] = []
    for source in sources:
        if source.is_result:
            lines.append(MaterialLine(f"result of {source.tool}" if source.tool else "tool result", source.text))
            continue
        if source.text.strip():
            lines.append(MaterialLine(source.role, source.text))
        lines += [MaterialLine(f"{source.role} calls {call.name}", call.arguments) for call in source.calls]
    return lines
