"""Settings for every test: examples are the same in every run, and no example is timed."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import Missing, Postgres, postgres_server

settings.register_profile("weir", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weir")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the whole session."""
    try:
        with postgres_server() as server:
            yield server
    except Missing as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture
async def postgres_url(postgres: Postgres) -> AsyncIterator[str]:
    """The URL of an empty database for one test."""
    name = await postgres.database()
    yield postgres.url(name)
    await postgres.drop(name)
