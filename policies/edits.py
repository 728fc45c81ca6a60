"""Making an edit: the one place where a message's new content gets its key, its count and its history."""

from policies.ledger import Edit, EditKind
from policies.messages import Transcript, count_occurrences
from policies.tokens import TokenCounter

MESSAGE_OVERHEAD = 4


def replace_content(transcript: Transcript, index: int, text: str, *, kind: EditKind, counter: TokenCounter) -> Edit:
    """The edit that replaces the content of message ``index`` by ``text``, its calls and ids kept."""
    message = transcript.messages[index]
    occurrences = transcript.occurrences or count_occurrences(transcript.messages)
    position = index - transcript.head
    return Edit(
        digest=message.digest,
        occurrence=occurrences[index],
        kind=kind,
        text=text,
        ref=message.ref,
        tokens=MESSAGE_OVERHEAD + counter.count(text),
        chain=transcript.chain[position] if 0 <= position < len(transcript.chain) else b"",
    )
