"""What a line of the log tells beside its message, and what it never does."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from proxy.config.loading import load_config
from proxy.config.values import secrets_of
from proxy.telemetry.logs import QueuedLog


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
