"""The model's part of a summary: asking for notes, refusing useless ones, going down the ladder.

A reply is refused when it is empty, under 20 tokens, not smaller than what it replaces, cut off into a loop,
a refusal, a tool call, or only reasoning. The input is bounded by ``max_input``: a longer transcript is read in
chunks whose notes are merged. Failure is an empty text, never an exception: the deterministic extract stands
beside the notes in any case.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.clipping import clip_middle
from policies.effects import Failed, Flow, Summarize, Summary
from policies.prompts import SYSTEM, VERSION, ask, render_transcript
from policies.tokens import TokenCounter

SHORTEST = 20
LOOP_RUN = 8  # words
LOOP_RUNS = 24
DISTINCT = 0.7
SMALLEST_CHUNK = 200
LABEL_TOKENS = 8
MOST_CHUNKS = 6
LONGEST_LINE = 600
PROMPT_OVERHEAD = 260
_REFUSAL = re.compile(
    r"^\W{0,3}(?:i(?:'|\u2019)?m sorry|sorry, |i can(?:no|')t |i cannot |i am unable|i'm unable|as an ai)",
    re.IGNORECASE,
)
_THINKING = re.compile(r"<think(?:ing)?>[\s\S]{0,200000}?(?:</think(?:ing)?>|\Z)")


@dataclass(frozen=True, slots=True)
class Line:
    """One thing said: who (``user``, ``assistant``, ``result of get_user``) and what."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes and what they cost; ``text`` is empty where every attempt failed, ``failure`` says why."""

    text: str = ""
    calls: int = 0
    failure: str = ""


def take_notes(
    lines: Sequence[Line], *, previous: str, max_tokens: int, max_input: int, counter: TokenCounter
) -> Flow[Notes]:
    """Notes of at most ``max_tokens`` on ``lines`` that extend ``previous``."""
    room = max(SMALLEST_CHUNK, max_input - PROMPT_OVERHEAD - max_tokens)
    chunks = _chunks(lines, max(SMALLEST_CHUNK, room - counter.count(previous)), counter)
    parts: list[str] = []
    calls = 0
    for number, chunk in enumerate(chunks):
        material = render_transcript(chunk, previous=previous if number == 0 else "")
        reply = yield Summarize(SYSTEM, ask(material, max_tokens), max_tokens, VERSION)
        calls += 1
        text, failure = judge(reply, material=material, max_tokens=max_tokens, counter=counter)
        if failure:
            return Notes("", calls, failure)
        parts.append(text)
    if len(parts) == 1:
        return Notes(parts[0], calls)
    each = room // len(parts) - LABEL_TOKENS
    merged = [(f"notes on part {n}", clip_middle(p, each, counter=counter, ref="")) for n, p in enumerate(parts, 1)]
    material = render_transcript(merged)
    reply = yield Summarize(SYSTEM, ask(material, max_tokens, merge=True), max_tokens, VERSION)
    text, failure = judge(reply, material=material, max_tokens=max_tokens, counter=counter)
    return Notes("" if failure else text, calls + 1, failure)


def judge(reply: object, *, material: str, max_tokens: int, counter: TokenCounter) -> tuple[str, str]:
    """The usable text of a reply and "", or "" and the code of why it is refused."""
    if isinstance(reply, Failed):
        return "", reply.reason
    if not isinstance(reply, Summary):
        return "", "no_reply"
    if reply.tool_calls:
        return "", "tool_call"
    text = _THINKING.sub("", reply.text).strip()
    if not text:
        return "", "reasoning_only" if reply.text.strip() else "empty"
    return _judge_text(text, material=material, max_tokens=max_tokens, counter=counter)


def _judge_text(text: str, *, material: str, max_tokens: int, counter: TokenCounter) -> tuple[str, str]:
    tokens = counter.count(text)
    if tokens < SHORTEST:
        return "", "too_short"
    if _REFUSAL.match(text):
        return "", "refusal"
    if tokens >= counter.count(material) * 0.9 or _echoes(text, material):
        return "", "not_smaller"
    if _loops(text):
        return "", "loop"
    if tokens > max_tokens * 1.5:
        return "", "too_long"
    return text, ""


def _echoes(text: str, material: str) -> bool:
    """Whether most of a reply is copied out of its input in long runs."""
    run = 200
    if len(text) < run * 2:
        return False
    pieces = [text[i : i + run] for i in range(0, len(text) - run + 1, run)]
    copied = sum(piece in material for piece in pieces)
    return copied * 2 > len(pieces)


def _loops(text: str) -> bool:
    words = text.split()
    runs = [tuple(words[i : i + LOOP_RUN]) for i in range(len(words) - LOOP_RUN + 1)]
    if len(runs) >= LOOP_RUNS and len(set(runs)) < len(runs) * DISTINCT:
        return True
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 8]
    return len(lines) >= 8 and len(set(lines)) * 3 < len(lines)


def _chunks(lines: Sequence[Line], budget: int, counter: TokenCounter) -> list[list[tuple[str, str]]]:
    """Consecutive chunks of at most ``budget`` tokens; long lines are clipped, the middle ones where too many."""
    chunks: list[list[tuple[str, str]]] = [[]]
    used = 0
    for line in lines:
        text = clip_middle(line.text, min(LONGEST_LINE, budget // 2), counter=counter, ref="")
        tokens = counter.count(f"[{line.origin}] {text}") + LABEL_TOKENS
        if used + tokens > budget and chunks[-1]:
            chunks.append([])
            used = 0
        chunks[-1].append((line.origin, text))
        used += tokens
    if len(chunks) > MOST_CHUNKS:
        half = MOST_CHUNKS // 2
        chunks = chunks[:half] + chunks[-(MOST_CHUNKS - half) :]
    return chunks
