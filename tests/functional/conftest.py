"""What every functional test may be run on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.functional.harness import Deployment
from tests.postgres import Postgres


@pytest.fixture(params=["one on SQLite", "two in turns on PostgreSQL"])
async def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Deployment]:
    """For tests that have to hold however many Weirs share a database."""
    if "one" in request.param:
        yield Deployment(tmp_path / "w.db")
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = await server.database()
    yield Deployment(server.url(name), 2)
    await server.drop(name)
