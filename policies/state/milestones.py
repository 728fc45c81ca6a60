"""Moments worth saving the state of a task: a subtask is done, something is decided, something blocks.

Only the messages are read that are newer than the last saved state, and only the words that say so.
"""

import re
from collections.abc import Sequence

from policies.checkpoint import Checkpoint, Status
from policies.extraction.readings import Source, normal
from policies.extraction.rules import sentences
from policies.settings import NoteTaking
from policies.state.decisions import decides, decision_of
from policies.state.issues import blocks
from policies.todos import calls_in, items_in_text, list_in_call

MOST_READ = 4_000
"""Characters of an answer that are read: reports stand at its beginning or its end."""
LONGEST = 320
SUBTASK_DONE, DECISION, BLOCKER = "subtask_done", "decision", "blocker"
_I = r"\b(?:i|we)(?:['\u2019]ve| have)?(?: now| just| successfully)?"
_DONE = re.compile(
    r"\b(?:has|have|is|are|was|were) (?:all |now |been |now been )?(?:successfully )"
    r"|\b(?:has|have) (?:now )?been (?:fixed|booked|cancell?ed|updated|changed|refunded|created|added|removed|deployed"
    r"|merged|upgraded|completed?|renamed|installed|solved|resolved|scheduled|transferred|issued|implemented)\b"
    rf"|{_I} (?:fixed|implemented|finished|completed|deployed|merged|solved|booked|cancell?ed|upgraded|rebooked)\b"
    r"|\b(?:is|are) (?:now )?(?:fixed|solved|resolved|complete|completed|done|implemented|deployed|merged)\b"
    r"|\ball (?:\d+ )?(?:the )?tests (?:now )?pass\b|\btests? (?:now )?pass(?:es)?\b",
    re.IGNORECASE,
)
_CHOSE = re.compile(
    r"\b(?:i|we)(?:['\u2019](?:ve|ll))?(?: have| will)? (?:decided|chose|opt(?:ed)? for|settled on|went with|go with"
    r"|picked)\b|\bdecision\s*:|\b(?:i|we)['\u2019](?:ll|re| will)?(?: going)? (?:use|using|keep|go with) \b[^.]*"
    r"\b(?:instead of|rather than)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\?|\b(?:if|once|when|would|could|should|may|might|must|not|cannot|can|need(?:s)? to|will be|to be|let me know"
    r"|until|after|before|already|n['\u2019]t)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_CUES = {
    SUBTASK_DONE: "success fixed finished complete done deployed merged solved resolved booked cancel upgraded"
    " implemented been pass",
    DECISION: "decided chose opt settled went picked decision instead rather go",
    BLOCKER: "block stuck waiting proceed continue unable go",
}
_WORDS_OF = {kind: tuple(words.split()) for kind, words in _CUES.items()}
"""Words of which one stands in every sentence of a kind."""


def is_hedged(sentence: str) -> bool:
    """Whether a sentence asks, conditions, plans or denies rather than reports."""
    return bool(_HEDGED.search(sentence))


def milestone(sources_new: Sequence[Source], *, state: Checkpoint | None, tools: NoteTaking) -> str | None:
    """``subtask_done``, ``decision`` or ``blocker`` where these messages hold one that ``state`` does not; else None.

    A message that the model wrote while it goes on with a call announces rather than reports, so only its lists and
    its decisions count.
    """
    if _finishes_subtask(sources_new, state, tools):
        return SUBTASK_DONE
    found = ""
    for source in sources_new:
        if source.role != "assistant" or source.is_result or not source.text.strip():
            continue
        found = found or _said(source, state)
    return found or None


def _finishes_subtask(sources: Sequence[Source], state: Checkpoint | None, tools: NoteTaking) -> bool:
    """Whether a list in these messages has something done that was not done before."""
    before = {normal(s.text) for s in state.with_status(Status.DONE)} if state else set()
    for _, call in calls_in(sources, tools):
        made = list_in_call(call.arguments)
        listed = made.items if made is not None else ()
        if any(i.status is Status.DONE and normal(i.text) not in before for i in listed):
            return True
    boxed = (s for source in sources if source.role == "assistant" for s in items_in_text(source.text))
    return any(s.status is Status.DONE and normal(s.text) not in before for s in boxed)


def _said(source: Source, state: Checkpoint | None) -> str:
    """The milestone that an answer states; empty for none."""
    text = (
        source.text if len(source.text) <= MOST_READ else source.text[: MOST_READ // 2] + source.text[-MOST_READ // 2 :]
    )
    kinds = _possible(text.lower())
    if not kinds:
        return ""
    for sentence in sentences(text, longest=LONGEST):
        here = _possible(sentence.lower(), kinds)
        kind = _kind(sentence, here, working=bool(source.calls)) if here else ""
        if kind and not _is_known(sentence, kind, state):
            return kind
    return ""


def _possible(lower: str, kinds: Sequence[str] = (SUBTASK_DONE, DECISION, BLOCKER)) -> tuple[str, ...]:
    """Of these kinds those that one of their words stands for in the text, which is in small letters."""
    return tuple(kind for kind in kinds if any(word in lower for word in _WORDS_OF[kind]))


def _kind(sentence: str, possible: Sequence[str], *, working: bool) -> str:
    """What a sentence states of the kinds that are possible; empty for nothing."""
    if DECISION in possible and _CHOSE.search(sentence) and decides(sentence) and not sentence.endswith("?"):
        return DECISION
    if BLOCKER in possible and blocks(sentence) and not sentence.endswith("?"):
        return BLOCKER
    if SUBTASK_DONE in possible and not working and _DONE.search(sentence) and not is_hedged(sentence):
        return SUBTASK_DONE
    return ""


def _is_known(sentence: str, kind: str, state: Checkpoint | None) -> bool:
    if state is None:
        return False
    if kind == DECISION:
        text = normal(decision_of(sentence).text)
        return any(normal(d.text) == text for d in state.decisions)
    held = state.open_issues if kind == BLOCKER else tuple(s.text for s in state.with_status(Status.DONE))
    return normal(sentence) in {normal(text) for text in held}
