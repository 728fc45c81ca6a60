"""What functional tests run on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.functional.harness import Deployment
from tests.postgres import Postgres


@pytest.fixture
async def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Deployment]:
    """One Weir on SQLite; two on PostgreSQL where a test says ``EITHER`` or ``SHARED``, or names 2."""
    if getattr(request, "param", 1) == 1:
        yield Deployment(tmp_path / "w.db")
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = await server.with_schema()
    yield Deployment(server.url(name), 2)
    await server.drop(name)
