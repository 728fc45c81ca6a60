"""Originals in pages: one removed message, or all that a summary or a version of the checkpoint stands for."""

import asyncio
from dataclasses import dataclass
from hashlib import sha256

from policies.clipping import TEXT_OF
from proxy.errors import InvalidRequest, NotFound
from proxy.routes.question import MOST_DIGITS, Answer, Question
from proxy.routes.respond import JSON
from proxy.wire.chat import body_of, read_message
from proxy.wire.raw import split_array

PAGE = 64 * 1024
LONGEST_REF = 100
TEXT = b"text/plain; charset=utf-8"
READ = "Originals are read"


async def blob(question: Question) -> Answer:
    """The original of a removed message, or of all that a summary covers, in pages of at most 64 KiB.

    ``REF`` is the JSON that the client sent, ``REF.txt`` what it says, as UTF-8.
    """
    tenant, given = question.own(READ), question.path["ref"]
    cursor = cursor_in(question)
    ref = given.removesuffix(TEXT_OF)
    body = await _original(question, tenant, ref)
    return await page(body, cursor, as_text=given.endswith(TEXT_OF))


async def page(body: bytes, cursor: int, *, as_text: bool = False) -> Answer:
    """One page of ``body`` from a cursor on, as JSON or as the text that it says.

    Cursors count bytes, and a page ends between two characters. ``x-weir-size`` and ``x-weir-sha256`` are those of the
    whole, ``x-weir-end`` is true on the last page, and ``x-weir-cursor`` leads to the next one.
    """
    found = await asyncio.to_thread(_page, body, cursor, as_text=as_text)
    headers = [(b"x-weir-size", str(found.size).encode()), (b"x-weir-sha256", found.sha256.encode())]
    headers.append((b"x-weir-end", b"true" if found.following is None else b"false"))
    if found.following is not None:
        headers.append((b"x-weir-cursor", str(found.following).encode()))
    return Answer(found.part, kind=TEXT if as_text else JSON, headers=headers)


def cursor_in(question: Question) -> int:
    """Where the page begins, in bytes. Raises InvalidRequest for what is no number."""
    given = question.query.get("cursor", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS):
        raise InvalidRequest("cursor must be a number of bytes.", param="cursor")
    return int(given)


async def _original(question: Question, tenant: str, ref: str) -> bytes:
    waiting = question.runtime.settler.original(tenant, ref)
    if waiting is not None:
        return waiting
    store = question.runtime.store
    if len(ref) <= LONGEST_REF and ref.isprintable():
        original = await store.original(tenant, ref)
        if original is not None:
            return original.body
        covered = await store.covered(tenant, ref)
        if covered:
            return array_of([each.body for each in covered])
    raise NotFound(f"There is no original with the ref {ref[:64]!r}.")


def array_of(bodies: list[bytes]) -> bytes:
    """Messages as one JSON array, each as the client sent it."""
    return b"[" + b",".join(bodies) + b"]"


@dataclass(frozen=True, slots=True)
class _Page:
    part: bytes
    following: int | None
    size: int
    sha256: str


def _page(body: bytes, start: int, *, as_text: bool) -> _Page:
    """The bytes from ``start`` on, 64 KiB or a few less, so that no character is parted; nothing beyond the end."""
    whole = _said(body) if as_text else body
    stop = min(len(whole), start + PAGE)
    while start + 4 < stop < len(whole) and whole[stop] & 0xC0 == 0x80:
        stop -= 1
    return _Page(whole[start:stop], stop if stop < len(whole) else None, len(whole), sha256(whole).hexdigest())


def _said(body: bytes) -> bytes:
    """The text of a message, or of each in a list of them, as UTF-8."""
    messages = split_array(body) if body.startswith(b"[") else (body,)
    return "\n".join(body_of(read_message(raw)).text for raw in messages or ()).encode("utf-8", "surrogatepass")
