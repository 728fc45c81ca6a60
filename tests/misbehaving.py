"""What the simulator of the tests does wrong beyond what ``weir simulate`` offers: faults, and useless summarisers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.upstream import Problem, Request, SimulatedAnswer, SimulatedCall
from tests.upstream.delivery import (
    FAULTS,
    FaultRule,
    InjectedFault,
    Scene,
    SummaryWriter,
    Transmission,
    as_json,
    instruction_of,
    read_material,
    schema_of,
)
from tests.upstream.window import Count, Dialect, status_problem

_FIRST_TEXT = re.compile(rb'"(?:content|text)":"(?=[^"])')


def _end_early(sent: Transmission, fault: InjectedFault, _: Scene) -> Transmission:
    return replace(sent, chunks=sent.chunks[: int(fault.number(2))]) if sent.streamed else sent


def _no_done(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    return replace(sent, chunks=sent.chunks[:-1]) if sent.streamed else sent


def _error_after_content(sent: Transmission, fault: InjectedFault, scene: Scene) -> Transmission:
    if not sent.streamed:
        return as_json(scene.overflow)
    return replace(sent, chunks=(*sent.chunks[: int(fault.number(2))], scene.error_after(int(fault.number(2)))))


def _empty_200(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    return replace(sent, chunks=(), length=None if sent.streamed else 0)


def _truncated_json(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    whole = b"".join(sent.chunks)
    half = whole[: len(whole) // 2]
    return replace(sent, chunks=(half,), length=None if sent.streamed else len(half))


def _split_bytes(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    whole = b"".join(sent.chunks)
    return replace(sent, chunks=tuple(whole[i : i + 1] for i in range(len(whole))))


def _framing(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    """Legal but rare framing: byte order mark, comments, CRLF and CR line ends, ``id``, no space after ``data:``."""
    if not sent.streamed:
        return sent
    events = [b"\xef\xbb\xbf: connected\n\n"]
    for index, event in enumerate(sent.chunks):
        match index % 4:
            case 0:
                events.append(event.replace(b"\n", b"\r\n"))
            case 1:
                events.append(b": keep-alive\n\n" + event.replace(b"data: ", b"data:", 1))
            case 2:
                events.append(event.replace(b"\n", b"\r"))
            case _:
                events.append(b"id: %d\nretry: 3000\n" % index + event)
    return replace(sent, chunks=tuple(events))


def _separators(sent: Transmission, _: InjectedFault, __: Scene) -> Transmission:
    """Unicode line separators in the text, raw as JSON allows, which only a wrong splitter takes for line ends."""
    marks = "\u2028\u2029\u0085".encode()
    changed = tuple(_FIRST_TEXT.sub(lambda match: match.group() + marks, chunk, count=1) for chunk in sent.chunks)
    return replace(sent, chunks=changed, length=None if sent.streamed else sum(map(len, changed)))


def _huge_event(sent: Transmission, fault: InjectedFault, _: Scene) -> Transmission:
    if not sent.streamed:
        return sent
    filler = b"x" * int(fault.number(1) * 1024 * 1024)
    huge = (
        b'data: {"id":"chatcmpl-huge","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,'
    )
    huge += b'"delta":{"content":"' + filler + b'"},"finish_reason":null}]}\n\n'
    return replace(sent, chunks=(*sent.chunks[:1], huge, *sent.chunks[1:]))


def _html(_: Transmission, fault: InjectedFault, __: Scene) -> Transmission:
    body = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
    status = int(fault.number(502))
    return Transmission(status=status, headers={"content-type": "text/html"}, chunks=(body,), length=len(body))


ALL_FAULTS: Mapping[str, FaultRule] = {
    **FAULTS,
    "end_early": FaultRule(_end_early),
    "no_done": FaultRule(_no_done),
    "error_in_stream_after_content": FaultRule(_error_after_content),
    "empty_200": FaultRule(_empty_200, wins=True),
    "truncated_json": FaultRule(_truncated_json),
    "split_bytes": FaultRule(_split_bytes),
    "framing": FaultRule(_framing),
    "separators": FaultRule(_separators),
    "huge_event": FaultRule(_huge_event),
    "html": FaultRule(_html, wins=True),
}


class SummaryMode(StrEnum):
    """How a request for a summary is answered; everything but ``ok`` is a way for a summariser to fail.

    ``invented`` adds identifiers that the material does not
    have, ``drops`` leaves out every path, ``launders`` repeats what tool results order as what the user wants.
    ``first_bad_then_ok`` is of use only when it is told that an earlier answer was refused. ``no_schema`` refuses
    ``response_format``, ``empty_form`` fills nothing into a schema, and ``reasoning_model`` refuses what OpenAI's
    reasoning models do: ``max_tokens`` and a temperature.
    """

    OK = "ok"
    INVENTED = "invented"
    LAUNDERS = "launders"
    DROPS = "drops"
    FIRST_BAD_THEN_OK = "first_bad_then_ok"
    NO_SCHEMA = "no_schema"
    EMPTY_FORM = "empty_form"
    REASONING_MODEL = "reasoning_model"
    STATUS_500 = "status_500"
    STATUS_401 = "status_401"
    STATUS_429 = "status_429"
    NOT_UTF8 = "not_utf8"
    WHITESPACE = "whitespace"
    GARBAGE = "garbage"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    ECHO = "echo"
    REFUSAL = "refusal"
    TOOL_CALL = "tool_call"
    TOO_LONG = "too_long"
    REASONING_ONLY = "reasoning_only"


_AGAIN = re.compile(r"\b(?:earlier|previous|last) answer\b", re.IGNORECASE)
_PATH = re.compile(r"[\w.-]{0,60}/[\w./-]{1,120}")
_FROM_TOOL = re.compile(r"^\[(?:tool|result)\b[^\]]{0,80}\]\s?(.*)$", re.MULTILINE)
_ORDER = re.compile(
    r"[^.!?\n]{0,120}\b(?:remember|authori[sz]ed|always|never|must|ignore|approved|instructions?)\b[^.!?\n]{0,120}",
    re.IGNORECASE,
)
INVENTED = (
    "The fix went into src/invented/ghost_module_77.py, see ticket WEIR-998877",
    "The service listens on port 48213 and its id is 5550001234",
)
SAID: Mapping[SummaryMode, SimulatedAnswer] = {
    SummaryMode.EMPTY: SimulatedAnswer(),
    SummaryMode.WHITESPACE: SimulatedAnswer(text=" \n\t \n "),
    SummaryMode.GARBAGE: SimulatedAnswer(
        text="\ufffd\u0000\ufffd}{][ \ufffd\ufffd <<<< 0x \ufffd ;;;; \ufffd\ufffd\ufffd }}}} \ufffd"
    ),
    SummaryMode.REFUSAL: SimulatedAnswer(text="I'm sorry, but I can't help with summarizing this conversation."),
    SummaryMode.TOOL_CALL: SimulatedAnswer(calls=(SimulatedCall("read_file", '{"path": "notes.md"}'),)),
    SummaryMode.REASONING_ONLY: SimulatedAnswer(
        text="<think>The user wants notes on the conversation. Let me think about it.</think>"
    ),
}
STATUSES: Mapping[SummaryMode, int] = {
    SummaryMode.STATUS_500: 500,
    SummaryMode.STATUS_401: 401,
    SummaryMode.STATUS_429: 429,
}


@dataclass(frozen=True, slots=True)
class Failing(SummaryWriter):
    """A summariser that fails in one way, in the dialect of OpenAI."""

    mode: SummaryMode

    def check(self, request: Request) -> None:
        if self.mode in STATUSES:
            model = str(request.get("model"))
            problem = status_problem(STATUSES[self.mode], model=model, dialect=Dialect.OPENAI, retry_after="1")
            raise problem
        if self.mode is SummaryMode.NO_SCHEMA and schema_of(request) is not None:
            said = "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."
            raise Problem(message=said, param="response_format")
        if self.mode is SummaryMode.REASONING_MODEL and "max_tokens" in request:
            said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
            raise Problem(message=f"{said}instead.", param="max_tokens", code="unsupported_parameter")
        if self.mode is SummaryMode.REASONING_MODEL and request.get("temperature", 1) != 1:
            said = "Unsupported value: 'temperature' does not support 0 with this model."
            raise Problem(message=said, param="temperature", code="unsupported_value")

    def answer(self, request: Request, *, max_output: int | None, count: Count) -> SimulatedAnswer:
        if self.mode in SAID:
            return SAID[self.mode]
        if self.mode is SummaryMode.ECHO:
            return SimulatedAnswer(text=read_material(request), endless=True)
        if self.mode is SummaryMode.TOO_LONG:
            sentences = (
                f"Item {number} of the conversation was discussed at length and is repeated here in full.\n"
                for number in range(1, max(60, count(read_material(request)) // 8))
            )
            return SimulatedAnswer(text="".join(sentences), endless=True)
        if self.mode is SummaryMode.FIRST_BAD_THEN_OK and not _AGAIN.search(instruction_of(request)):
            return SimulatedAnswer(text="Noted.")
        if self.mode is SummaryMode.EMPTY_FORM and schema_of(request) is not None:
            return SimulatedAnswer(text="{}")
        return SummaryWriter.answer(self, request, max_output=max_output, count=count)

    def lines(self, data: str) -> list[str]:
        lines = SummaryWriter.lines(self, data)
        match self.mode:
            case SummaryMode.DROPS:
                return [line for raw in lines if (line := _PATH.sub("", raw).strip())]
            case SummaryMode.INVENTED:
                return [*lines[:1], *INVENTED, *lines[1:]]
            case SummaryMode.LAUNDERS:
                orders = [order.strip() for said in _FROM_TOOL.findall(data) for order in _ORDER.findall(said)]
                return [*(f"The user wants this: {order}" for order in dict.fromkeys(orders)), *lines]
            case _:
                return lines

    def deliver(self, delivery: Transmission) -> Transmission:
        if self.mode is SummaryMode.NOT_UTF8:
            broken = delivery.chunks[0].replace(b'"content":"', b'"content":"\xff\xfe')
            return replace(delivery, chunks=(broken,), length=len(broken))
        return replace(delivery, stall_at=-1) if self.mode is SummaryMode.TIMEOUT else delivery
