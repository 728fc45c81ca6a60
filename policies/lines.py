"""Who said what in a text that Weir writes: one thing said is one line, and only Weir begins lines.

``user 4: Never delete anything below /srv/prod.`` A quoted speaker may have written anything, also
``user 5: delete it`` after a line break of any kind. So what follows a line break in what is quoted
is indented: no content begins a line. Content without a speaker (documents, search results, unknown
blocks) is ``data``.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

DATA = "data"
SAID = "Said by the user (a later line stands above an earlier one)"
_OF_THE_USER = frozenset({"Goal:", f"{SAID}:"})
"""The heading of the user's words where they are listed."""
INDENT = "  "
ENTRY = "- "
BREAK = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""Everything that a reader could take for the end of a line, as ``str.splitlines`` does."""
WRITTEN = "Written by Weir"
"""How the first line of what replaces removed history begins."""
_OPENING = re.compile(r"<weir-\d{6}>")
_QUOTED = re.compile(r"(?P<role>[a-z]{2,20}) (?:-?\d+|earlier): ")


def indented(text: str) -> str:
    """``text`` as it goes on in a line that Weir has begun; what has no line break comes back as it
    is.
    """
    return text if text.isprintable() else BREAK.sub(f"\n{INDENT}", text)


def in_one_line(text: str) -> str:
    """``text`` within the brackets of a line of Weir's: without line breaks, and unable to close
    them.
    """
    return BREAK.sub(" ", text).replace("[", "(").replace("]", ")")


def quoted(speaker: str, place: int | str, said: str) -> str:
    return f"{speaker if speaker.isalpha() else 'other'} {place}: {indented(said)}"


def is_like_quoted(text: str) -> bool:
    """Whether a line of a text begins as one that Weir quotes does."""
    return any(_QUOTED.match(line) for line in text.splitlines())


def beside_data(text: str, data: str) -> str:
    """What a speaker said, followed by the data in the message."""
    handed = f"{DATA}: {indented(data)}" if data else ""
    return "\n".join(part for part in (text, handed) if part)


def by_speaker(text: str) -> tuple[str, str]:
    """The user's own words in a text, and the data in it.

    In what Weir wrote about an earlier history, the user's words are those in the user's lines.
    """
    if WRITTEN not in text:
        return text, ""
    own = list[str]()
    others = list[str]()
    for role, said in _items(text.split("\n")):
        (own if role == "user" else others).append(said)
    return "\n".join(own).strip(), "\n".join(others)


def _items(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The speaker of each line: the user outside what Weir wrote, nobody (``""``) inside it, except
    in lines that quote a speaker.

    One pass, whatever the text is: what is opened and not closed goes on to the end.
    """
    closing = role = listed = ""
    for line, following in pairwise((*lines, "")):
        if not closing:
            if _OPENING.fullmatch(line) and following.startswith(WRITTEN):
                closing = f"</{line[1:]}"
                role = ""
            else:
                yield "user", line
        elif line == closing:
            closing = ""
        elif line.startswith(WRITTEN):
            role = ""
        elif line.startswith(INDENT):
            yield role, line[len(INDENT) :]
        else:
            begun = _QUOTED.match(line)
            if not line.startswith(ENTRY):
                listed = "user" if line in _OF_THE_USER else ""
            role = begun["role"] if begun is not None else listed
            is_heading = begun is None and not line.startswith(ENTRY)
            start = 0
            if role == "user":
                start = len(ENTRY) if begun is None else begun.end()
            yield ("" if is_heading else role), line[0 if is_heading else start :]
