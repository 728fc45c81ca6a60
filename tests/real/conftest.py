"""The real parts that these tests need; a test is skipped with the reason where one cannot be had."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.environments import Unavailable, environment
from tests.real.llama import Llama, model_server


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """A model server with four slots of 2,048 tokens, for the whole session."""
    try:
        with model_server(tmp_path_factory.mktemp("llama"), slots=4, window=2_048) as server:
            yield server
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def newest_sdk() -> Path:
    """The interpreter of an environment with the newest ``openai`` and nothing of Weir's."""
    try:
        return environment("openai") / "bin" / "python"
    except Unavailable as reason:
        pytest.skip(str(reason))
