import json
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory of its own and an environment without anything of Weir's."""
    for name in list(os.environ):
        if name.startswith(("WEIR_", "OPENAI_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weir(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def test_where_there_is_no_database_no_key_is_looked_for_and_none_is_made(clean):
    for command in (("list",), ("rotate", "nobody"), ("limit", "nobody", "--concurrency", "1"), ("revoke", "nobody")):
        assert "weir serve makes one, --store names another" in weir("keys", *command).stderr
        assert not (clean / "weir.db").exists()
    weir("db", "migrate")
    assert "weir keys create --name me makes one" in weir("keys", "list").stderr
    assert weir("keys", "rotate", "nobody").stderr == "weir: no key nobody; see weir keys list\n"


def test_an_address_that_is_taken_and_a_file_that_is_not_there_are_told_with_what_to_do(clean):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = weir("simulate", "--port", str(port)).stderr
    assert said.startswith(f"weir: cannot listen on 127.0.0.1:{port}: Address already in use; end the program")
    assert weir("simulate", "--host", "192.0.2.1").stderr.endswith("; give --host an address of this machine\n")
    assert weir("usage", "--config", "none.yaml").stderr.endswith("No such file or directory; weir init writes one\n")


@pytest.mark.requirement("S.17", "S.2")
def test_no_command_shows_a_secret(clean, monkeypatch):
    (clean / "weir.yaml").write_text(
        "auth: {admin_token: '${ADMIN}'}\n"
        "keys: [{name: a, secret: '${CLIENT}'}]\n"
        "store: {url: 'postgresql+asyncpg://weir:canary-4@127.0.0.1:1/weir'}\n"
    )
    for name in ("ADMIN", "CLIENT", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"canary-{name}")

    results = [
        weir(*command, "--config", "weir.yaml", *form)
        for command in (("doctor", "--values"), ("policy", "list"), ("keys", "list"))
        for form in ((), ("--json",))
    ]

    assert [result.exit_code for result in results] == [0, 0, 0, 0, 1, 1]
    assert "canary" not in "".join(result.output for result in results)
    shown = json.loads(results[1].stdout)
    assert shown["auth"]["admin_token"] == shown["keys"][0]["secret"] == "***"
    assert shown["upstreams"]["openai"]["api_key"] == "***"
