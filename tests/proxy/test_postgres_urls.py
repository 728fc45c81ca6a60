"""What a PostgreSQL URL may look like, and what is said where it leads nowhere: a real server, a real PgBouncer."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from proxy.store import Store
from proxy.store.postgres import connecting
from proxy.store.records import StoreError
from tests.functional.harness import ROOT
from tests.postgres import Postgres, pgbouncer
from tests.proxy.store_rows import change, exchange

SERVE = "from proxy.cli import main; main()"


async def opened(url: str) -> Store:
    """A store that answers."""
    store = await Store.open(url)
    await store.ping()
    return store


@pytest.fixture(scope="module")
def people(postgres: Postgres) -> Iterator[None]:
    """A user with a password, and one who may only come encrypted."""
    asyncio.run(postgres.run("CREATE USER guarded PASSWORD 'secret' IN ROLE weir", "CREATE USER ciphered"))
    yield
    asyncio.run(postgres.run("DROP USER guarded", "DROP USER ciphered"))


async def test_urls_as_providers_print_them_are_understood(postgres_url: str) -> None:
    for scheme, parameters in (
        ("postgres", ""),
        ("postgresql", "?sslmode=prefer"),
        ("postgresql+asyncpg", "?options=-c%20work_mem%3D8MB&channel_binding=prefer&gssencmode=disable"),
        ("postgres", "?sslmode=disable&connect_timeout=10&application_name=w&target_session_attrs=read-write"),
    ):
        store = await opened(postgres_url.replace("postgresql", scheme, 1) + parameters)
        assert store.shared
        await store.close()


async def test_a_socket_a_password_and_several_hosts_are_understood(
    postgres: Postgres, postgres_url: str, people: None
) -> None:
    name = postgres_url.rpartition("/")[2]
    for url in (
        f"postgresql://weir@/{name}?host={postgres.folder}&port={postgres.port}",
        f"postgresql://weir@127.0.0.1:1,127.0.0.1:{postgres.port}/{name}",
        f"postgresql://127.0.0.1:{postgres.port}/?dbname={name}&user=guarded&password=secret",
    ):
        await (await opened(url)).close()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weir@", "guarded:canary-7@", 'password authentication failed for user "guarded"'),
        ("weir@", "ciphered@", "no encryption"),
        ("postgres?", "postgresx", 'x" does not exist'),
        ("port", "1", "Connect call failed ('127.0.0.1', 1)"),
        ("port", "five", "URL cannot be read"),
        ("127.0.0.1", "nowhere.invalid", "cannot be reached: "),
        ("postgres?", "postgres?sslmode=require", "takes no encrypted connection"),
        ("postgres?", "postgres?sslmode=verify-full", "takes no encrypted connection"),
        ("postgres?", "postgres?ssl=true", "takes no encrypted connection"),
        ("postgres?", "postgres?channel_binding=require", "takes no encrypted connection"),
        ("postgres?", "postgres?sslmode=strict", "`sslmode` parameter must be one of: disable, allow, prefer, require"),
        ("postgres?", "postgres?sslmode=verify-ca&sslrootcert=/no/such.pem", "not there: /no/such.pem"),
        ("postgres?", "postgres?target_session_attrs=some", "target_session_attrs is expected to be one of"),
        ("postgres?", "postgres?connect_timeout=soon", "connect_timeout in the store's URL is a number"),
        ("postgres?", "postgres?pgbouncer=true", "unrecognized configuration parameter \"pgbouncer\""),
        ("postgresql:", "postgresql+psycopg:", "its URL begins with sqlite+aiosqlite:// or postgresql://"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_in_a_line(old: str, new: str, said: str, postgres: Postgres, people: None) -> None:
    url = f"{postgres.url()}?".replace(str(postgres.port) if old == "port" else old, new, 1).removesuffix("?")
    with pytest.raises(StoreError) as caught:
        await Store.open(url)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", 'database server says: password authentication failed for user "guarded"'),
        ("import sys; sys.modules['asyncpg'] = None; ", "pip install 'weir-proxy[postgres]'"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_line(
    before: str, said: str, postgres: Postgres, people: None, tmp_path: Path
) -> None:
    url = f"postgres://guarded:canary-8@127.0.0.1:{postgres.port}/postgres"
    words = [sys.executable, "-c", before + SERVE, "serve", "--port", "0", "--store", url]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert ended.returncode == 1, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "cannot be used" in line]
    assert said in line
    assert "Traceback" not in ended.stderr
    assert "canary" not in ended.stderr


def test_a_server_is_verified_by_what_the_system_trusts_unless_a_file_is_named(tmp_path: Path) -> None:
    pem = Path(__file__).with_name("self_signed.pem")
    trusting, _ = connecting("postgres://u:p@db.example.com/weir?sslmode=verify-full", 5.0)
    assert trusting["ssl"].check_hostname
    named, _ = connecting(f"postgres://u:p@db.example.com/weir?sslmode=verify-full&sslrootcert={pem}", 5.0)
    assert "ssl" not in named
    assert "sslrootcert=" in named["dsn"]
    bound, notices = connecting("postgres://u:p@db.example.com/weir?channel_binding=require", 5.0)
    assert bound["dsn"].endswith("?sslmode=require")
    assert "cannot bind the channel" in notices[0]


@pytest.fixture
async def behind_a_pooler(postgres: Postgres, postgres_url: str) -> AsyncIterator[str]:
    with pgbouncer(postgres, size=2) as port:
        yield postgres_url.replace(str(postgres.port), str(port))


async def test_it_works_behind_a_pooler_that_gives_every_transaction_another_connection(behind_a_pooler: str) -> None:
    stores = [await Store.open(behind_a_pooler, connections=4) for _ in range(3)]

    async def write(number: int, store: Store) -> None:
        branch = f"b{number}"
        for step in range(6):
            await store.commit(change(step, branch=branch, conversation=branch, count=1, with_cut=step % 2 == 0))
            found = await store.branch("tenant-a", branch)
            assert found is not None
            assert found.version == step + 1
        await store.record([exchange(number, branch=branch, conversation=branch)])

    await asyncio.gather(*(write(number, stores[number % 3]) for number in range(9)))
    audited = await stores[0].verify()
    assert [chain.broken for chain in audited] == [None]
    assert len(await stores[1].conversations("tenant-a")) == 9
    for store in stores:
        await store.close()
