"""The page of one request: what the client sent next to what the model saw, and the outcome.

A viewer with a key can make a link to the page. It opens this one page, for reading, without
signing in; it ends after ``SHARED_DAYS`` days, or with the key.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace

from markupsafe import Markup, escape
from starlette.responses import Response

from proxy.dashboard.visit import PATH, SHARED_DAYS, PageVisit, Sessions, View, dollars
from proxy.errors import Forbidden, NotFound
from proxy.features.inspect import Pair, SideRow, both_sides, runs
from proxy.http import conversations as talks
from proxy.http.request import Json

MAX_SAME = 600
MAX_OTHER = 4_000
"""Characters of a message that are shown at first."""
WORDS = re.compile(r"\s+|[^\s]+")
SENTENCES = re.compile(r"(\n+|(?<=[.!?])\s+)")
MARKED_LENGTH = 12
"""Minimum characters of a sentence that is searched in an extract."""
FACT = re.compile(r"(?=.*[\d/_])[\w/.:#@-]{4,}")
EDGES = ".,;:()[]{}'\"`"
NOT_SENT = {
    "context_length_exceeded": (
        "Not enough could be removed, so the request was refused and not sent."
    ),
    "insufficient_quota": "A budget is used up, so the request was refused and not sent.",
    "rate_limit_exceeded": (
        "A rate or what is in flight left no room, so the request was refused and not sent."
    ),
}
"""What is said of a request that Weir refused, by its outcome."""


async def request(visit: PageVisit) -> View:
    return await _page(visit)


async def share(visit: PageVisit) -> View:
    if visit.is_operator:
        raise Forbidden("A link shows what was said: sign in with the key of the conversation.")
    token = Sessions(visit.runtime).link_to(visit.session, visit.path["id"], visit.path["rid"])
    return await _page(visit, link=f"{visit.origin}{PATH}/shared/{token}")


async def shared(visit: PageVisit) -> View | Response:
    opened = Sessions(visit.runtime).opened(visit.path["token"])
    if opened is None:
        raise NotFound("This link has ended, or it is not whole. Ask for a new one.")
    session, conversation, rid = opened
    path = {"id": conversation, "rid": rid}
    return await _page(replace(visit, session=session, path=path), is_shared=True)


async def _page(visit: PageVisit, *, link: str | None = None, is_shared: bool = False) -> View:
    one = await talks.one(visit.api_request())
    both = await both_sides(visit.api_request())
    written = [row.text for row in both["model"] if row.kind == "summary"]
    values = {
        "one": one,
        "both": both,
        "layers": both["exchange"]["layers"],
        "runs": runs(both),
        "sentences": list(sentences_on(both)),
        "extract": "\n".join(text for text in written if isinstance(text, str)),
        "link": link,
        "shows_text": not visit.is_operator,
        "is_shared": is_shared,
        "days": SHARED_DAYS,
    }
    return View("request.html", values)


def sentences_on(both: Json) -> Iterator[str | Markup]:
    """What Weir did to a request and what that costs, in sentences."""
    exchange = both["exchange"]
    limit = max(1, exchange["limit"])
    layers = exchange["layers"]
    has_acted = any(layer["kept"] for layer in layers)
    before = layers[0]["tokens_before"] if layers else exchange["tokens_after"]
    gone = [row for row in both["client"] if row.status == "removed"]
    yield f"The window was {before / limit:.0%} full."
    if exchange["outcome"] in NOT_SENT:
        yield NOT_SENT[exchange["outcome"]]
        return
    if exchange["observed"]:
        yield "The policy only observes: the client's own messages were sent."
        return
    if not has_acted:
        yield _kept_out(both, gone)
        return
    yield from _batch(exchange, gone)
    if gone and both["kept"] and all(row.link for row in gone):
        yield "Nothing is lost: the originals are stored."
    if exchange["turns_until_red"] is not None:
        yield f"At this rate the window is full again in about {_requests(exchange)}."
    if exchange["prefix_changed"] == "proxy" and exchange["cost_saved"]:
        saved = exchange["cost_saved"]
        than = "less" if saved > 0 else "more"
        yield Markup(
            "The provider had to read the new beginning without its cache; with that, this request"
            " cost {} {} than the client's own messages would have."
        ).format(dollars(abs(saved)), than)


def _kept_out(both: Json, gone: list[SideRow]) -> str:
    """What became of a request from which nothing new was removed. Its arrays may not be kept."""
    if gone:
        return (
            f"{_messages(len(gone))} that were removed before stayed out; nothing new was removed."
        )
    exchange = both["exchange"]
    if "fallback=1" in exchange["actions"]:
        return f"It did not fit the model that it was for, so it was sent to {exchange['model']}."
    if exchange["actions"] == "none":
        return "The request was sent as the client wrote it."
    if exchange["tokens_after"] < exchange["tokens_before"]:
        return "What was taken out before stayed out; nothing new was removed."
    return f"Nothing new was removed; what was done to it: {exchange['actions']}."


def _batch(exchange: Json, gone: list[SideRow]) -> Iterator[str]:
    written = [each for each in exchange["detail"].get("condensed", ()) if each["kept"]]
    tokens = sum(row.tokens for row in gone)
    if not written:
        freed = exchange["layers"][0]["tokens_before"] - exchange["tokens_after"]
        yield f"{max(0, freed):,} tokens were taken out of messages or with them."
        return
    kind = "an extract" if written[-1]["purpose"] == "extract" else "a summary"
    what = f"{_messages(len(gone))} of {tokens:,} tokens" if gone else "Earlier messages"
    yield f"{what} became {kind} of {exchange['detail'].get('summary_tokens', 0):,} tokens."


def _messages(count: int) -> str:
    return f"{count:,} earlier message{'' if count == 1 else 's'}"


def _requests(exchange: Json) -> str:
    count = max(1, round(exchange["turns_until_red"]))
    return f"{count:,} request{'' if count == 1 else 's'}"


def cut(row: SideRow, visit: PageVisit) -> str:
    text = row.text if isinstance(row.text, str) else ""
    most = MAX_SAME if row.status == "same" else MAX_OTHER
    return text if visit.query.get("full") == str(row.place) else text[:most]


def is_cut(row: SideRow, visit: PageVisit) -> bool:
    return isinstance(row.text, str) and len(cut(row, visit)) < len(row.text)


def still_shown(text: str, extract: str) -> Markup:
    """``text`` with what an extract keeps of it marked: whole sentences, else names, paths and
    numbers.
    """
    if not extract:
        return escape(text)
    mark = Markup("<mark>{}</mark>")
    shown: list[Markup] = []
    for sentence in SENTENCES.split(text):
        bare = sentence.strip()
        if len(bare) >= MARKED_LENGTH and bare in extract:
            shown.append(mark.format(sentence))
            continue
        for word in WORDS.findall(sentence):
            fact = word.strip(EDGES)
            is_shown = bool(FACT.fullmatch(fact)) and fact in extract
            shown.append(mark.format(word) if is_shown else escape(word))
    return Markup("").join(shown)


def marked(pair: Pair, side: str) -> Markup:
    """One side of a changed message, with what the other side lacks marked."""
    before, after = (row.text if row is not None else None for row in (pair.client, pair.model))
    if not isinstance(before, str) or not isinstance(after, str):
        return Markup('<p class="soft">Not kept.</p>')
    own, other = (before, after) if side == "client" else (after, before)
    frame = Markup("<del>{}</del>") if side == "client" else Markup("<ins>{}</ins>")
    mine, theirs = (WORDS.findall(text[:MAX_OTHER]) for text in (own, other))
    pieces: list[Markup] = []
    compared = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    for what, start, stop, _, _ in compared.get_opcodes():
        text = escape("".join(mine[start:stop]))
        pieces.append(text if what == "equal" or not text else frame.format(text))
    if len(own) > MAX_OTHER:
        more = Markup(' <span class="soft">and {} more characters</span>')
        pieces.append(more.format(f"{len(own) - MAX_OTHER:,}"))
    return Markup('<pre class="text" dir="auto">{}</pre>').format(Markup("").join(pieces))
