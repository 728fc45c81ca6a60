"""Everything that the command line says, as it was: help texts, tables, JSON, errors, exit codes."""

import pytest

from tests.golden import cli


def test_every_help_text_is_as_it_was() -> None:
    assert "\n".join(cli.helps()) == cli.HELP.read_text(encoding="utf-8")


@pytest.mark.timeout(900)  # a hundred commands, each with a store opened for it
def test_every_command_says_what_it_said_about_the_same_store() -> None:
    assert "\n".join(cli.outputs()) == cli.OUTPUT.read_text(encoding="utf-8")
