"""What a line of the log tells beside its message, and what it never does."""

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from proxy.config.loading import load_config
from proxy.config.values import masked_url, secrets_of
from proxy.telemetry.logs import LOG_CONTEXT, QueuedLog, RequestContext

SECRET = "canary7f3a-not-shaped"


@contextmanager
def logged(name: str = "weir.test.lines", *, form: str = "json", hide: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The lines of one logger, there once the block is left."""
    stream, lines = io.StringIO(), list[str]()
    handler = QueuedLog(stream, form="json" if form == "json" else "line")
    handler.hide(hide)
    logger = logging.getLogger(name)
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        handler.stop()
        lines.extend(stream.getvalue().splitlines())


@pytest.mark.requirement("A3.14")
async def test_a_line_has_the_ids_of_the_request_that_runs_in_tasks_and_threads_that_it_starts() -> None:
    log = logging.getLogger("weir.test.lines")

    async def serve(number: int) -> None:
        about = RequestContext(f"req_{number}", f"trace{number}")
        LOG_CONTEXT.set(about)
        log.warning("begins")
        about.conversation = f"c{number}"
        await asyncio.gather(asyncio.create_task(later(number)), asyncio.to_thread(log.warning, "number %d", number))

    async def later(number: int) -> None:
        await asyncio.sleep(0.001)
        log.warning("number %d", number)

    with logged() as lines:
        log.warning("nobody's")
        await asyncio.gather(*map(serve, range(5)))
        log.warning("number 9", extra={"request": "req_9", "conversation": None})
    told = [json.loads(line) for line in lines]
    assert "request" not in told[0]
    begun = [line for line in told if line["message"] == "begins"]
    assert len(begun) == 5
    assert all("conversation" not in line for line in begun)
    numbered = [line for line in told if line["message"].startswith("number")]
    assert len(numbered) == 11
    for line in numbered:
        number = line["message"][-1]
        assert line["request"] == f"req_{number}"
        assert number == "9" or (line["conversation"], line["trace"]) == (f"c{number}", f"trace{number}")


@pytest.mark.requirement("A3.14")
def test_the_ids_stand_behind_the_message_and_before_what_follows_it() -> None:
    with logged(form="line") as lines:
        try:
            int("words of a message")
        except ValueError:
            logging.getLogger("weir.test.lines").exception(
                "it failed", extra={"request": "req_1", "conversation": "a b"}
            )
    assert lines[0].endswith('ERROR   weir.test.lines it failed request=req_1 conversation="a b"')
    assert lines[1] == "    builtins.ValueError"
    assert "test_logs.py" in lines[2]
    assert len(lines) == 3


def fails() -> None:
    """Raises an exception with a cause; both quote a message."""
    try:
        int("the quokka of a tool result")
    except ValueError as error:
        raise RuntimeError("the quokka of a message") from error


@pytest.mark.requirement("S.16")
@pytest.mark.parametrize("form", ["line", "json"])
def test_of_exceptions_types_and_places_are_written_and_no_words(form: str) -> None:
    with logged(form=form) as lines:
        try:
            fails()
        except RuntimeError:
            logging.getLogger("weir.test.lines").exception("planning failed")
    text = "\n".join(lines)
    assert "quokka" not in text
    assert text.index("builtins.RuntimeError") < text.index("caused by builtins.ValueError")
    assert "test_of_exceptions_types_and_places" in text


@pytest.mark.requirement("S.16")
async def test_a_task_that_nobody_waits_for_is_named_without_what_it_held() -> None:
    async def fails(said: str) -> None:
        raise ValueError(said)

    with logged("asyncio") as lines:
        task = asyncio.create_task(fails("the quokka of a message"))
        await asyncio.sleep(0)
        del task
        gc.collect()
        asyncio.get_running_loop().call_exception_handler({"message": "odd", "held": "the quokka"})
    assert len(lines) == 2
    assert "never retrieved" in lines[0]
    assert "ValueError" in lines[0]
    assert "quokka" not in "".join(lines)


@pytest.mark.requirement("S.16", "S.17")
@pytest.mark.parametrize("form", ["line", "json"])
def test_a_secret_of_the_configuration_is_hidden_whatever_says_it(form: str) -> None:
    with logged(form=form, hide=(SECRET, "ab")) as lines:
        log = logging.getLogger("weir.test.lines")
        log.warning("collector: %s, %r", SECRET, {"x-team": f"a{SECRET}"})
        log.warning("about it", extra={"request": SECRET})
        log.warning("absent")
    assert SECRET not in "".join(lines)
    assert "absent" in lines[-1], "what is too short to be a secret stays"
    with logged(form=form) as lines:
        logging.getLogger("weir.test.lines").warning("collector: %s", SECRET)
    assert SECRET in lines[0]


def test_a_record_that_cannot_be_told_is_counted_and_printed_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    handler = QueuedLog(io.StringIO())
    record = logging.LogRecord("weir", logging.INFO, "", 0, "%d words", ("the quokka",), None)
    handler.handle(record)
    assert handler.stop()
    assert handler.dropped == 1
    assert capsys.readouterr().err == ""


@pytest.mark.requirement("S.17", "S.2")
def test_every_secret_of_a_configuration_is_known() -> None:
    env = {
        "WEIR_STORE": "postgresql+asyncpg://u:pass%20word@h/d?password=dbquery",
        "WEIR_ADMIN_TOKEN": "admin-token",
        "WEIR_UPSTREAM": "http://h/v1",
        "OPENAI_API_KEY": "upstream-key",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://who:otlp-pass@h:4318/?api_key=otlp-key",
    }
    found = set(secrets_of(load_config(env=env)))
    expected = {"pass%20word", "pass word", "dbquery", "admin-token", "upstream-key", "otlp-pass", "otlp-key"}
    assert expected <= found
    assert "pass" not in found


@pytest.mark.requirement("S.17")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?user=u&password=p&ssl=on", "postgresql://h/d?user=u&password=***&ssl=on"),
        ("http://h:4318/?api_key=p&x-token=q", "http://h:4318/?api_key=***&x-token=***"),
        ("sqlite+aiosqlite:///weir.db", "sqlite+aiosqlite:///weir.db"),
    ],
)
def test_an_address_is_shown_without_what_is_secret_in_it(url: str, shown: str) -> None:
    assert masked_url(url) == shown
