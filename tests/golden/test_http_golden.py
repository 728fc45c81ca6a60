"""What Weir answers and says of a configuration is what was written down, byte for byte but for what differs by run."""

import json
from pathlib import Path

from tests.golden import config_messages, http_answers


def differing(found: str, written: Path) -> list[str]:
    """The lines that are others than those that were written, by their beginning."""
    now, then = (dict(json.loads(text)) for text in (found, written.read_text()))
    return [name for name in {**then, **now} if json.dumps(now.get(name)) != json.dumps(then.get(name))]


async def test_every_answer_is_the_one_that_was_written_down(tmp_path: Path) -> None:
    answers = await http_answers.record(tmp_path)

    assert differing(http_answers.written(answers), http_answers.ANSWERS) == []


def test_what_is_said_of_a_configuration_is_what_was_written_down(tmp_path: Path) -> None:
    found = config_messages.written(config_messages.recorded(tmp_path))

    assert differing(found, config_messages.MESSAGES) == []
