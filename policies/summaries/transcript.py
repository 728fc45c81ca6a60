"""The material of a question: every line with its origin, fenced, and unable to close its fence or to speak for others.

Whoever wrote a tool result may have written anything into it: markers that close a fence, a chat template's control
tokens, labels of a speaker. All of them are replaced by look-alikes, invisible characters are left out, and the
fence's tag is a digest of what it holds, so no content can know it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.summary import fence, harmless

LONGEST_ORIGIN = 64
_IN_ORIGIN = re.compile(r"[^\w .,:/-]+")
_RESULT = re.compile(r"(?:tool result|result of)\b")
_CALL = re.compile(r"\w{1,20} calls\b")
_HEADING = re.compile(r"(?:#{1,6} |\*\*)?[A-Z][\w ]{1,40}(?:\([^()\n]{0,80}\))?(?:\*\*)?:")
_BARE_HEADING = re.compile(_HEADING.pattern + r"[*\s]{0,6}\Z")
AUTHORITIES = frozenset({"user", "system", "developer"})


@dataclass(frozen=True, slots=True)
class Line:
    """One thing said: who (``user``, ``assistant``, ``assistant calls look``, ``result of look``) and what."""

    origin: str
    text: str

    @property
    def is_result(self) -> bool:
        """Whether it came from a tool."""
        return _RESULT.match(self.origin) is not None

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a tool."""
        return _CALL.match(self.origin) is not None

    @property
    def has_authority(self) -> bool:
        """Whether it is the word of somebody who may decide: the user, or who set the conversation up."""
        return self.origin in AUTHORITIES


def label(origin: str) -> str:
    """``origin`` as it stands in front of a line: one line, at most 64 characters, nothing that could be markup."""
    return " ".join(_IN_ORIGIN.sub(" ", harmless(origin)).split())[:LONGEST_ORIGIN].strip() or "unknown"


def harmless_lines(lines: Sequence[Line]) -> list[Line]:
    """The lines that say something, made harmless."""
    return [Line(label(line.origin), harmless(line.text).strip()) for line in lines if line.text.strip()]


def written_out(line: Line) -> str:
    """A harmless line with its origin."""
    return f"[{line.origin}] {line.text}"


def enclosed(name: str, content: str) -> str:
    """Harmless ``content`` in its fence; ``name`` says what it is."""
    tag = fence(name, content=content)
    return f"<{tag}> {name}\n{content}\n</{tag}>"


def without_empty_headings(text: str) -> str:
    """``text`` without headings that nothing follows but another heading or the end."""
    kept: list[str] = []
    below = ""
    for line in reversed(text.split("\n")):
        if _BARE_HEADING.match(line) and (not below or _HEADING.match(below)):
            continue
        kept.append(line)
        below = line if line.strip() else below
    return "\n".join(reversed(kept))


def render_transcript(lines: Sequence[Line], *, previous: str = "") -> str:
    """The fenced transcript of harmless lines, behind the notes taken earlier, if any; both must be harmless."""
    said = enclosed("transcript", "\n".join(map(written_out, lines)))
    return f"{enclosed('notes so far', previous)}\n{said}" if previous else said
