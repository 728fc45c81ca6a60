"""Reads from an upstream's refusal, or its answer, what was too much and what the limit is.

A refusal is a kind and perhaps two numbers: the most that the upstream takes, and what it found.
Kinds are tokens (CONTEXT, and COMPLETION where the answer is counted in), how long an answer may
be, how many images, how large one of them, how many entries of the array, the bytes of the body,
and errors that a smaller request would not cure. The wordings of all of them are tables in
``overflow_rules``. All are handled alike: the limit is remembered for the upstream and the model
(``proxy.models.limits``), the request is planned again within it and sent again, and from then on
every request is planned within it beforehand.

The order is: codes and statuses of rate limits, explicit wordings, measures other than tokens,
output caps, and only then sentences in which something is over what is called a context. A 413 that
says nothing else is about bytes.

The finish reason ``length`` says two things: the model wrote as much as the client requested, or
the window left it less; then the reserve was too small and the answer is not whole.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from proxy.tap import NO_USAGE, usage_from
from proxy.upstream import overflow_rules as rules
from proxy.upstream.overflow_rules import (
    ErrorReport,
    Numbers,
    decode,
    failure_in,
    plain,
    read_numbers,
    take_apart,
)

BODY_HEAD = 65_536
WINDOW_FULL = "model_context_window_exceeded"  # Anthropic's stop reason
LENGTHS = frozenset({"length", "max_tokens", "max_output_tokens", "MAX_TOKENS", WINDOW_FULL})
WINDOW_SLACK = 2  # llama.cpp and vLLM stop one token before the window is full
MIN_LIMIT = 256
MAX_LIMIT = 20_000_000


class Kind(StrEnum):
    """What an answer says about size.

    CONTEXT: the prompt itself is too large. COMPLETION: the prompt fits, prompt plus ``max_tokens``
    does not, so that a smaller ``max_tokens`` is the first cure. OUTPUT_CAP: ``max_tokens`` is
    above what the model may write, which is no overflow. BINDING: thinking follows other content
    than it was signed for. CHANGED: reasoning is not as it was given. RATE: tokens a minute, quota,
    credit. IMAGES: more of them than are taken; IMAGE_SIDE and IMAGE_BYTES: one is too large,
    MANY_IMAGES_SIDE: too large for one of many. ENTRIES: the array of messages is too long. BYTES:
    the body is too large. PAYLOAD: a field is too long or too large.
    """

    NONE = "none"
    CONTEXT = "context"
    COMPLETION = "completion"
    OUTPUT_CAP = "output_cap"
    BINDING = "binding"
    CHANGED = "changed"
    RATE = "rate"
    IMAGES = "images"
    IMAGE_SIDE = "image_side"
    IMAGE_BYTES = "image_bytes"
    MANY_IMAGES_SIDE = "many_images_side"
    ENTRIES = "entries"
    BYTES = "bytes"
    PAYLOAD = "payload"


MEASURED = frozenset(Kind(rule.kind) for rule in rules.MEASURES)
"""Kinds of limits, other than tokens, within which a request can be planned again."""


class Verdict(msgspec.Struct, frozen=True):
    """What the upstream said, in tokens or what the kind is about; None where it gave no number.

    Attributes:
        limit: the window, or the input limit if ``input_limit``; for other kinds the limit that was
            named.
        requested: prompt plus completion where both are given, else the total or the prompt as
            stated; for other kinds what was found in the request.
        input_limit: ``limit`` bounds the prompt alone.
        at_least: ``prompt`` is a lower bound.
        doubtful: ``limit`` is not to be learned from this wording.
    """

    kind: Kind
    limit: int | None = None
    prompt: int | None = None
    completion: int | None = None
    requested: int | None = None
    input_limit: bool = False
    at_least: bool = False
    doubtful: bool = False

    @property
    def is_overflow(self) -> bool:
        return self.kind in (Kind.CONTEXT, Kind.COMPLETION)

    def clamp(self, margin: int) -> int | None:
        if self.limit is None or self.prompt is None or self.input_limit or self.at_least:
            return None
        room = self.limit - self.prompt - margin
        return room if self.is_overflow and room >= 1 else None


NONE = Verdict(Kind.NONE)


def classify(status: int, body: bytes, *, window: int | None = None) -> Verdict:
    """What a whole response says about size; never raises. ``window`` is what Weir believes, in
    tokens.
    """
    text = body[:BODY_HEAD].decode("utf-8", "replace").strip()
    if not text or rules.NO_BODY.match(plain(text[:64])):
        return _by_status(status)
    value = decode(text)
    return (
        _classify_success(value, window=window)
        if status < 400
        else _judge(status, take_apart(value))
    )


def classify_event(data: bytes) -> Verdict:
    if len(data) > BODY_HEAD:  # a large delta; no error is that long
        return NONE
    text = data.decode("utf-8", "replace").strip()
    value = decode(text)
    if not isinstance(value, dict | list):
        return NONE if text.startswith(("{", "[")) else _judge(400, take_apart(value))
    failure = failure_in(value)
    return NONE if failure is None else _judge_inner(failure)


def classify_answer(
    finish_reason: str | None,
    *,
    prompt: int | None,
    completion: int | None,
    max_tokens: int | None,
    window: int | None,
) -> Verdict:
    """What a successful answer says: the window ran out, or the upstream cut the prompt, or
    nothing.

    An ordinary length stop (``max_tokens`` reached, or room left in the window) is NONE.
    """
    total = prompt + completion if prompt is not None and completion is not None else prompt
    seen = Verdict(
        Kind.CONTEXT, limit=window, prompt=prompt, completion=completion, requested=total
    )
    if finish_reason == WINDOW_FULL:
        return msgspec.structs.replace(seen, kind=Kind.COMPLETION if completion else Kind.CONTEXT)
    if prompt is None or prompt <= 0:
        return NONE
    if window is not None and prompt > window:  # accepted in silence (z.ai)
        return seen
    if finish_reason not in LENGTHS or completion is None:
        return NONE
    if completion <= 0 and max_tokens != 0:  # cut to fill the window (Xiaomi MiMo)
        return seen if window is None or prompt >= 0.99 * window else NONE
    reached = max_tokens is not None and completion >= max_tokens
    if reached or total is None:
        return NONE
    if window is not None:  # n_ctx reached while generating (llama.cpp)
        return (
            msgspec.structs.replace(seen, kind=Kind.COMPLETION)
            if total >= window - WINDOW_SLACK
            else NONE
        )
    if (
        max_tokens is None
        and total >= 1024
        and _power_of_two(total)
        and not _power_of_two(completion)
    ):
        return msgspec.structs.replace(seen, kind=Kind.COMPLETION, limit=total, doubtful=True)
    return NONE


class Ending(StrEnum):
    OUTPUT_CAP = "output_cap"
    RESERVE_EXHAUSTED = "reserve_exhausted"


def is_cut_short(reasons: Sequence[str]) -> bool:
    return any(reason in LENGTHS for reason in reasons)


def ending_of(
    reasons: Sequence[str],
    *,
    prompt: int | None,
    completion: int | None,
    max_tokens: int | None,
    window: int | None,
    clamped: bool = False,
) -> Ending | None:
    """What stopped an answer with these finish reasons; None if it came to its own end.

    Args:
        reasons: one for each choice; with several of them ``completion`` is the sum of all, and
            says nothing.
        prompt: tokens as reported, else as estimated; None if neither is known.
        completion: tokens as reported.
        max_tokens: what the client requested.
        window: tokens as Weir believes them.
        clamped: Weir requested less than the client did, because the window left no more.
    """
    if not is_cut_short(reasons):
        return None
    if clamped or WINDOW_FULL in reasons:
        return Ending.RESERVE_EXHAUSTED
    if completion is None or len(reasons) > 1:
        full = None not in (prompt, max_tokens, window) and (window or 0) - (prompt or 0) < (
            max_tokens or 0
        )
        return Ending.RESERVE_EXHAUSTED if full else Ending.OUTPUT_CAP
    verdict = classify_answer(
        "length", prompt=prompt, completion=completion, max_tokens=max_tokens, window=window
    )
    return Ending.OUTPUT_CAP if verdict.kind is Kind.NONE else Ending.RESERVE_EXHAUSTED


def plausible_limit(verdict: Verdict) -> int | None:
    """The limit if it may be learned, tokens: it was exceeded by the numbers next to it, if there
    are any.

    None for wordings whose number is known to be wrong in some build (vLLM of about 0.15).
    """
    limit = verdict.limit
    if limit is None or not verdict.is_overflow or verdict.doubtful:
        return None
    if not MIN_LIMIT <= limit <= MAX_LIMIT:
        return None
    asked = max((n for n in (verdict.prompt, verdict.requested) if n is not None), default=None)
    return limit if asked is None or asked >= limit else None


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _by_status(status: int) -> Verdict:
    if status in (429, 503, 529):
        return Verdict(Kind.RATE)
    return Verdict(Kind.BYTES) if status == 413 else NONE


def _classify_success(value: object, *, window: int | None) -> Verdict:
    failure = failure_in(value)
    if failure is not None:
        return _judge_inner(failure)
    if not isinstance(value, dict):
        return NONE
    usage = usage_from(value.get("usage")) or NO_USAGE
    reason = _finish_reason(value)
    return classify_answer(
        reason, prompt=usage.prompt, completion=usage.completion, max_tokens=None, window=window
    )


def _finish_reason(value: dict[str, object]) -> str | None:
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    details = value.get("incomplete_details")
    reasons = (
        choice.get("finish_reason") if isinstance(choice, dict) else None,
        value.get("stop_reason"),
        details.get("reason") if isinstance(details, dict) else None,
    )
    return next((reason for reason in reasons if isinstance(reason, str)), None)


def _judge_inner(failure: object) -> Verdict:
    report = take_apart(failure)
    return _judge(report.status or 400, report)


def _judge(status: int, report: ErrorReport) -> Verdict:
    coded = bool(report.codes & rules.OVERFLOW_CODES)
    explicit = next((text for text in report.texts if _explicit(text)), None)
    rated = bool(report.codes & rules.RATE_CODES)
    rated = rated or (
        not coded and any(rule.search(text) for text in report.texts for rule in rules.RATE)
    )
    if rated or status in (429, 529) or (status == 503 and not coded and explicit is None):
        return _rate(report)
    if any(rules.BOUND in text for text in report.texts):
        return Verdict(Kind.BINDING)
    if any(rules.CHANGED.search(text[: rules.HEAD]) for text in report.texts):
        return Verdict(Kind.CHANGED)
    if status in (401, 402, 403) or report.codes & rules.OTHER_CODES:
        return NONE
    if coded or explicit is not None:
        return _overflow(report, explicit)
    measured = _measured(report)
    if measured is not None:
        return measured
    if report.codes & rules.PAYLOAD_CODES:
        return Verdict(Kind.PAYLOAD)
    for text in report.texts:
        other = _not_overflow(text[: rules.HEAD])
        if other is not None:
            return other
    if status == 413 and not any(map(rules.TOKENS.search, report.texts)):
        return Verdict(Kind.BYTES)
    generic = next((text for text in report.texts if _generic(text[: rules.HEAD], status)), None)
    return _by_status(status) if generic is None else _overflow(report, generic)


def _measured(report: ErrorReport) -> Verdict | None:
    for text in report.texts:
        head = text[: rules.HEAD]
        for rule in rules.MEASURES:
            if rule.said.search(head):
                return Verdict(
                    Kind(rule.kind),
                    limit=_amount(rule.most, head),
                    requested=_amount(rule.found, head),
                )
    return Verdict(Kind.BYTES) if report.codes & rules.BODY_CODES else None


def _amount(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    """The number that the first of these patterns finds, in bytes where a unit follows it."""
    match = next((found for found in (pattern.search(text) for pattern in patterns) if found), None)
    if match is None:
        return None
    number, *unit = match.groups()
    return int(number) * rules.UNIT_BYTES.get((unit[0] or "")[:1] if unit else "", 1)


def _explicit(text: str) -> bool:
    if rules.CHARACTERS.search(text) and not rules.TOKENS.search(text):
        return False
    for found in filter(None, (phrase.search(text) for phrase in rules.PHRASES)):
        before = rules.CLAUSE.split(text[max(0, found.start() - 160) : found.start()])[-1]
        if not rules.CONDITION.search(before):
            return True
    return False


def _generic(text: str, status: int) -> bool:
    for sentence in rules.SENTENCE.split(text, maxsplit=rules.MAX_SENTENCES):
        if len(sentence) < rules.MIN_SENTENCE_LEN or rules.GUARD.search(sentence):
            continue
        if any(rules.chained(sentence, *rule) for rule in rules.GENERIC):
            return True
        chinese = rules.CHINESE_TOKENS.search(sentence) and not rules.CHINESE_GUARD.search(sentence)
        if chinese and any(rules.chained(sentence, *rule) for rule in rules.CHINESE):
            return True
    if status not in (400, 413, 422) or rules.GUARD.search(text):
        return False
    return rules.LAST_RESORT.search(text) is not None or _outnumbered(text)


def _outnumbered(text: str) -> bool:
    told = read_numbers(text) if rules.TOKENS.search(text) else Numbers()
    asked = told.prompt if told.requested is None else told.requested
    return told.limit is not None and asked is not None and asked > told.limit >= MIN_LIMIT


def _rate(report: ErrorReport) -> Verdict:
    for text in report.texts:
        limit = rules.RATE_LIMIT.search(text)
        asked = rules.RATE_REQUESTED.search(text)
        if limit or asked:
            number = _group(asked)
            completion = number if "max_tokens" in text else None
            return Verdict(Kind.RATE, limit=_group(limit), completion=completion, requested=number)
    return Verdict(Kind.RATE)


def _group(match: re.Match[str] | None) -> int | None:
    found = next((group for group in match.groups() if group), None) if match else None
    return None if found is None else int(found)


def _not_overflow(text: str) -> Verdict | None:
    batch = rules.BATCH.search(text)
    if batch:
        tokens = int(batch.group(1))
        return Verdict(Kind.NONE, limit=int(batch.group(2)), prompt=tokens, requested=tokens)
    if any(rules.chained(text, *rule) for rule in rules.CAPS) and not rules.chained(
        text, *rules.SUMMED
    ):
        if rules.CAP_GUARD.search(text):
            return NONE
        limit = next(
            (n for n in (_group(p.search(text)) for p in rules.CAP_LIMITS) if n is not None), None
        )
        asked = _group(rules.CAP_ASKED.search(text))
        return Verdict(Kind.OUTPUT_CAP, limit=limit, completion=asked, requested=asked)
    if rules.PAYLOAD.search(text) or (
        rules.UNITS.search(text) and rules.SIZED.search(text) and not rules.TOKENS.search(text)
    ):
        return Verdict(Kind.PAYLOAD)
    return None


def _overflow(report: ErrorReport, said: str | None) -> Verdict:
    texts = report.texts if said is None else dict.fromkeys((said, *report.texts))
    read = ((read_numbers(text), text) for text in texts)
    told, text = max(read, key=lambda pair: pair[0].told, default=(Numbers(), ""))
    stated = report.numbers.get("n_prompt_tokens")
    prompt = told.prompt if stated is None else stated
    verdict = Verdict(
        Kind.CONTEXT,
        limit=report.numbers.get("n_ctx", told.limit),
        prompt=prompt,
        completion=told.completion,
        requested=told.requested if stated is None else stated,
        input_limit=rules.INPUT_LIMIT.search(text) is not None,
        at_least=rules.AT_LEAST.search(text) is not None,
        doubtful=rules.DOUBTFUL.search(text) is not None,
    )
    return msgspec.structs.replace(verdict, kind=_kind(verdict, report.texts))


def _kind(verdict: Verdict, texts: Sequence[str]) -> Kind:
    if verdict.input_limit or verdict.limit is None:
        would = any(
            "max_tokens would exceed" in text or "max_tokens exceeds the context" in text
            for text in texts
        )
        return Kind.COMPLETION if would else Kind.CONTEXT
    asks_more = verdict.requested is not None and verdict.requested > verdict.limit
    fits = verdict.prompt is not None and verdict.prompt < verdict.limit
    return Kind.COMPLETION if fits and asks_more else Kind.CONTEXT
