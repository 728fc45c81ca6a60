"""The process that plans what is long: it is given a function of the pure half and its arguments, and answers.

A frame each way is a pickle: only Weir writes them, to a pipe that nobody else has. The history's bytes go beside it,
uncopied. What was read is kept here, from one request of a conversation to the next. Answers are pairs: what a flow
asks for (``asks``), what it has just done (``did``), whether the definitions of the tools are needed (``tools``), and
one that ends the work: what came of it (``done``), what it refuses by (``refuses``), or where it failed (``failed``).
"""

import copyreg
import io
import os
import pickle
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

from policies import Pages
from policies.effects import Compare, Done, Offload
from policies.messages import PolicyError, Tools
from policies.text.segments import Readings
from policies.tokens import TokenCounter
from proxy.custom.process import Frames, answering, write_frame
from proxy.effects.perform import Returned, SharedReadings, by_shingles, step
from proxy.telemetry.process import collect_seldom, give_back, keep_little
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT
from proxy.wire.codecs import codec_of
from proxy.wire.counting import TextCounter, Vocabulary
from proxy.wire.responses import RESPONSES

NICENESS = 1
"""Requests that are not planned here go first."""
COLLECT_AFTER = 100_000
"""Objects: a long history is read into very many, none of which goes before the plan is made."""


class _Side(NamedTuple):
    output: BinaryIO
    frames: Frames

    def answer(self, kind: str, value: object = None) -> None:
        write_frame(self.output, written((kind, value)))

    def ask(self, kind: str, value: object = None) -> Any:
        self.answer(kind, value)
        reply = pickle.loads(self.frames.get())  # noqa: S301 - from the Weir that started this process
        if reply is None:
            raise _Abandoned
        return reply


class _Abandoned(BaseException): ...


@cache
def _side() -> _Side:
    return _Side(*answering())


def work() -> None:
    side = _side()
    os.nice(NICENESS)
    keep_little()
    collect_seldom(COLLECT_AFTER)
    side.answer("ready")
    while True:
        asked, buffers = side.frames.get(), [side.frames.get() for _ in range(int(side.frames.get()))]
        try:
            answer = ("done", _run(pickle.loads(asked, buffers=buffers), side))  # noqa: S301 - as above
        except PolicyError as error:
            answer = ("refuses", (type(error), error.args, vars(error)))
        except BaseException:  # noqa: BLE001 - whatever is wrong with one request, the next is another's
            answer = ("failed", traceback.format_exc())
        del asked, buffers
        side.answer(*answer)
        give_back()


def _run(asked: Callable[[], Any], side: _Side) -> Any:
    made = asked()
    if not isinstance(made, Generator):
        return made
    now = step(made)
    while not isinstance(now, Returned):
        if isinstance(now, Offload):
            now = step(made, Done())
        elif isinstance(now, Compare) and now.model is None:
            now = step(made, by_shingles(now))
        else:
            now = step(made, side.ask("asks", now))
    return now.value


def _read_tools() -> Tools:
    return cast("Tools", _side().ask("tools"))


def _announce(what: str) -> None:
    _side().answer("did", what)


@cache
def _readings() -> Readings:
    return Readings(most=30_000)


@cache
def _pages() -> Pages:
    return Pages()


@cache
def _vocabulary(name: str, directories: tuple[Path, ...]) -> Vocabulary:
    return Vocabulary(name, directories)


def _counter(name: str, source: TokenCounter) -> TextCounter:
    return TextCounter(name, source, _threads())


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def refusal(kind: type[PolicyError], args: tuple[object, ...], facts: dict[str, object]) -> PolicyError:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(facts)
    return error


class Unmovable(Exception): ...


def packed(work: "partial[Any]") -> list[bytes | memoryview]:
    """The frames that ask for a function of the pure half, bound to a transcript and more. Raises Unmovable."""
    moved, named = replace(work.args[0], read_tools=_read_tools), dict(work.keywords)
    if "announce" in named:
        named["announce"] = _announce
    buffers = list[pickle.PickleBuffer]()
    try:
        frame = written(partial(work.func, moved, *work.args[1:], **named), buffers)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unmovable(str(error)) from None
    return [frame, b"%d" % len(buffers), *(buffer.raw() for buffer in buffers)]


def written(value: object, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    target = io.BytesIO()
    beside = None if buffers is None else buffers.append
    pickler = pickle.Pickler(target, pickle.HIGHEST_PROTOCOL, buffer_callback=beside)
    pickler.dispatch_table = _INSTEAD
    pickler.dump(value)
    return target.getvalue()


_INSTEAD: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    MappingProxyType: lambda found: (dict, (dict(found),)),
    **{type(codec): lambda codec: (codec_of, (codec.path,)) for codec in (CHAT, RESPONSES, MESSAGES)},
    SharedReadings: lambda _: (_readings, ()),
    Pages: lambda _: (_pages, ()),
    Vocabulary: lambda found: (_vocabulary, (found.name, found._directories)),  # noqa: SLF001 - to be made again there
    TextCounter: lambda counter: (_counter, (counter.name, counter._source)),  # noqa: SLF001
}
