import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from policies.settings import ContextSettings
from proxy.access.admission import Keyring
from proxy.cli import COMMANDS, main
from proxy.config.presets import policy_values
from proxy.store import Store


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


def subcommands() -> list[tuple[str, ...]]:
    """Every command, as typed."""
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = main.get_command(None, name)
        found += [(name,), *((name, each) for each in getattr(command, "commands", ()))]
    return found


def test_help_names_every_command_and_has_an_example():
    result = weir("--help")

    assert result.exit_code == 0
    assert "Example:" in result.stdout
    for name, summary in COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert summary.split()[0] in result.stdout


@pytest.mark.parametrize("command", subcommands(), ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    result = weir(*command, "--help")

    assert result.exit_code == 0
    assert "Example:" in result.stdout
    assert f"weir {command[0]}" in result.stdout.split("Example:")[1]


def test_help_loads_no_command():
    code = (
        "import sys\nfrom proxy.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "loaded = {'pydantic', 'rich', 'sqlalchemy', 'starlette', 'litellm', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("srve",), "weir: No such command 'srve'."),
        (("policy", "show"), "weir: Missing argument 'NAME'. (see weir policy show --help)"),
        (("doctor", "--jsn"), "weir: No such option '--jsn'."),
        (("keys", "create", "--name", "a", "--allow", "all"), "weir: Invalid value for '--allow'"),
        (
            ("keys", "create", "--name", "a", "--policy", "of"),
            "weir: Invalid value for --policy: no policy of; did you",
        ),
        (("keys", "create", "--name", " "), "weir: Invalid value for --name: should not be empty"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(clean, args, expected):
    result = weir(*args)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("policy", "show", "balancd"), "weir: no policy balancd; did you mean balanced?"),
        (("doctor", "--values", "--config", "none.yaml"), "weir: none.yaml: cannot be read: No such file or directory"),
        (("policy", "list", "--config", "bad.yaml"), "weir: bad.yaml:1: listenn: unknown key; did you mean listen?"),
        (("keys", "revoke", "nobody"), "weir: sqlite+aiosqlite:///weir.db: there is no database at"),
        (("keys", "list", "--store", "sqlite+aiosqlite:////nowhere/at/all/w.db"), "weir: sqlite+aiosqlite:////nowhere"),
    ],
)
def test_a_failure_is_one_line_on_stderr_and_exit_1(clean, args, expected):
    (clean / "bad.yaml").write_text("listenn: {}\n")

    result = weir(*args)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1


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


def test_output_to_a_full_disk_is_told_in_one_line(clean):
    script = "import sys; from proxy.cli import main; main(['doctor', '--values', '--json'])"
    with Path("/dev/full").open("w") as full:
        shown = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (shown.returncode, shown.stderr) == (1, "weir: the output cannot be written: No space left on device\n")


def test_without_a_command_weir_shows_its_help_and_exits_2():
    result = weir()

    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_weir_tells_its_version():
    result = weir("--version")

    assert (result.exit_code, result.stdout.split()[0]) == (0, "weir,")


def test_the_effective_configuration_shows_where_each_value_came_from(clean, monkeypatch):
    (clean / "weir.yaml").write_text("listen:\n  port: 9000\npolicies: {mine: {headroom: 0.2}}\n")
    monkeypatch.setenv("WEIR_WINDOW", "8192")

    lines = weir("doctor", "--values", "--config", "weir.yaml").stdout.splitlines()

    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["listen.port"] == ["9000", "weir.yaml:2"]
    assert rows["window"] == ["8192", "WEIR_WINDOW"]
    assert rows["listen.host"] == ["127.0.0.1", "default"]
    assert rows["policies.mine"] == ["weir", "policy", "show", "mine", "weir.yaml:3"]


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


def test_a_good_file_is_ok_and_a_bad_one_lists_every_fault(clean):
    (clean / "good.yaml").write_text("policies: {a: {headroom: 0.01}}\n")
    (clean / "bad.yaml").write_text("listen: {prot: 1}\nlimits:\n  depth: 0\n")

    good = weir("doctor", "--config", "good.yaml")
    bad = weir("doctor", "--config", "bad.yaml")

    assert "ok    configuration: good.yaml\nwarn  configuration: policies.a: headroom 1.0% < 5%" in good.stdout
    assert bad.exit_code == 1
    assert bad.stdout.splitlines() == [
        "fail  configuration: bad.yaml:1: listen.prot: unknown key; did you mean port?",
        "fail  configuration: bad.yaml:3: limits.depth: should be greater than 0",
    ]
    assert json.loads(weir("doctor", "--config", "bad.yaml", "--json").stdout)["ok"] is False
    assert weir("policy", "list", "--config", "bad.yaml").stderr.endswith("(and 1 more, see weir doctor)\n")


@pytest.mark.requirement("A2.5")
def test_a_policy_is_shown_with_every_default(clean):
    shown = json.loads(weir("policy", "show", "balanced", "--json").stdout)
    table = weir("policy", "show", "balanced").stdout

    assert list(shown.pop("tokens")) == ["8192", "32768", "131072"]
    assert shown == json.loads(json.dumps(policy_values(ContextSettings())))
    rows = {line.split()[0]: line.split()[-1] for line in table.splitlines()}
    assert (rows["reserve_floor"], rows["shapes[5].low_water"], rows["zones.red_at"]) == ("4000", "0.3", "0.9")
    assert [rows[f"cascade[{at}].layer"] for at in range(4)] == ["ingest_cap", "dedupe", "evict", "compact"]
    assert "cascade[4].layer" not in rows


def test_policies_are_listed_with_the_default_marked(clean, monkeypatch):
    (clean / "weir.yaml").write_text("policies: {mine: {preset: off}}\n")
    monkeypatch.setenv("WEIR_POLICY", "mine")

    rows = json.loads(weir("policy", "list", "--config", "weir.yaml", "--json").stdout)
    table = weir("policy", "list", "--config", "weir.yaml").stdout

    listed = [(row["name"], row["from"], row["default"], row["mode"]) for row in rows]
    assert listed[-1] == ("mine", "file", True, "off")
    assert {("balanced", "preset", False, "enforce"), ("off", "preset", False, "off")} <= set(listed)
    assert "mine (default)" in table
    assert rows[0]["cascade"] == ["ingest_cap", "dedupe", "evict", "compact"]


@pytest.mark.requirement("P7", "S.2")
def test_a_key_is_made_used_and_revoked(clean):
    made = weir("keys", "create", "--name", "team", "--policy", "off", "--models", "gpt-*", "--allow", "mode", "--json")
    secret = json.loads(made.stdout)["secret"]

    caller = keyring(clean / "weir.db").identify({"authorization": f"Bearer {secret}"})
    assert (caller.name, caller.policy, caller.models, caller.allow) == ("team", "off", ("gpt-*",), {"mode"})

    twice = weir("keys", "create", "--name", "team")
    assert (twice.exit_code, twice.stderr.count("\n")) == (1, 1)
    assert "'team'" in twice.stderr

    listed = weir("keys", "list")
    assert listed.stdout.splitlines()[1].split()[:4] == ["team", "off", "gpt-*", "mode"]
    assert weir("keys", "revoke", "team").stdout == "Revoked key team.\n"
    assert weir("keys", "revoke", "team").exit_code == 1
    assert json.loads(weir("keys", "list", "--json").stdout)[0]["revoked"] is not None

    for path in clean.iterdir():
        assert secret.encode() not in path.read_bytes()


def keyring(path: Path) -> Keyring:
    async def read() -> Keyring:
        store = await Store.open(f"sqlite+aiosqlite:///{path}", visitor=True)
        try:
            return Keyring((), await store.list_keys(), secret=await store.secret(), mode="keys")
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_new_keys_secret_stands_alone_on_stdout(clean):
    result = weir("keys", "create", "--name", "team", "--store", "sqlite+aiosqlite:///other.db")

    assert result.stdout.startswith("weir-sk-")
    assert result.stdout.count("\n") == 1
    assert "cannot be shown again" in result.stderr
    assert "only known keys" in result.stderr
    assert (clean / "other.db").exists()
