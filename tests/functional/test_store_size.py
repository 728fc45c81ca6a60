"""A Weir whose database is larger than it may be makes room by itself, and says so."""

import logging
from pathlib import Path

import pytest

from benchmarks.storage import play, sizes
from proxy.store import Store
from tests.functional.harness import COUNTER, weir
from tests.functional.test_store_failures import until
from tests.proxy.store_rows import url
from tests.proxy.test_store_size import fill
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

CONFIG = """
upstreams: {{main: {{base_url: "{upstream}"}}}}
store: {{max_size: 700KB, retention: null}}
"""


@pytest.mark.requirement("P9", "R.72")
async def test_a_database_above_its_size_is_made_smaller_while_weir_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    await fill(store, 40)
    await store.close()
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        yaml = CONFIG.format(upstream=simulator.base_url)
        async with weir(simulator.base_url, path, yaml=yaml, folder=tmp_path, window=8192) as target:
            held = target.runtime.store
            assert held is not None

            async def smaller() -> bool:
                return any("store.max_size" in message for message in caplog.messages)

            await until(smaller)
            left = {row.id for row in await held.conversations("tenant-a", limit=100)}
            assert 0 < len(left) < 40
            assert left == {f"c{number}" for number in range(40 - len(left), 40)}
            await held.checkpoint()
            assert path.stat().st_size <= 700_000


@pytest.mark.requirement("P9", "R.72")
async def test_a_request_of_an_agent_that_reads_files_leaves_three_kilobytes(tmp_path: Path) -> None:
    """Beside what a database takes that has nothing in it; the same requests as ``python -m benchmarks.storage``."""
    empty, path = tmp_path / "empty.db", tmp_path / "w.db"
    await (await Store.open(url(empty))).close()
    made = await play(url(path), conversations=4, requests=30)
    assert made == 120
    assert sizes(path)[0] - sizes(empty)[0] <= 3_072 * made
