from pathlib import Path

import pytest

from proxy.access.destination import rule_for, upstream_for
from proxy.config.file import ConfigError
from proxy.config.loading import load_config
from proxy.config.values import Config, Flags, public

KEY = {"OPENAI_API_KEY": "sk-test-0123456789"}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "weir.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(tmp_path: Path, text: str, *, env: dict[str, str] | None = None, flags: Flags | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(written(tmp_path, text), env=env or {}, flags=flags or Flags())
    return [problem.removeprefix(f"{tmp_path}/") for problem in raised.value.problems]


def config_of(tmp_path: Path, text: str, *, env: dict[str, str] | None = None, flags: Flags | None = None) -> Config:
    return load_config(written(tmp_path, text), env=env or {}, flags=flags or Flags())


@pytest.mark.requirement("A0.24")
def test_a_zone_named_without_its_start_names_the_start(tmp_path):
    found = problems(tmp_path, "policies:\n  mine:\n    zones: {yellow: 0.5}\n")

    assert found == ["weir.yaml:3: policies.mine.zones.yellow: unknown key; did you mean yellow_at?"]


def test_flags_stand_above_environment_above_file_above_defaults(tmp_path):
    text = "listen: {host: 127.0.0.2, port: 1000}\nstore: {url: 'sqlite+aiosqlite:///file.db'}\nwindow: 1000\n"
    env = {"WEIR_PORT": "2000", "WEIR_STORE": "sqlite+aiosqlite:///env.db", "WEIR_WINDOW": "2000"}

    config = config_of(tmp_path, text, env=env, flags=Flags(store="sqlite+aiosqlite:///flag.db", window=3000))

    assert config.listen.host == "127.0.0.2"
    assert config.listen.port == 2000
    assert config.store.url.endswith("flag.db")
    assert config.policy().window == 3000
    assert config.places[("listen", "port")] == "WEIR_PORT"
    assert config.places[("window",)] == "--window"
    assert config.places[("listen", "host")] == f"{tmp_path}/weir.yaml:1"


@pytest.mark.requirement("S.7")
def test_an_upstream_of_a_flag_never_gets_a_key_of_the_file(tmp_path):
    text = (
        "upstreams: {a: {base_url: 'https://a.example/v1', api_key: key-for-a}}\n"
        "models: [{match: 'm-*', upstream: a, window: 4096}]\n"
    )

    config = config_of(tmp_path, text, flags=Flags(upstream="http://127.0.0.1:9/v1"))

    assert [each.base_url for each in config.upstreams.values()] == ["http://127.0.0.1:9/v1"]
    assert upstream_for(config, "m-1").passes_key
    assert rule_for(config.models, "m-1").window == 4096


@pytest.mark.requirement("S.29")
def test_an_open_door_beyond_loopback_is_refused(tmp_path):
    found = problems(tmp_path, "listen:\n  host: 0.0.0.0\nauth: {mode: open}\n")
    assert found[0].startswith("weir.yaml:2: listen.host: 0.0.0.0 is not loopback and auth.mode is open")
    with pytest.raises(ConfigError, match=r"^--host: listen\.host: 192\.168\.1\.2 is not loopback"):
        load_config(env={**KEY, "WEIR_AUTH_MODE": "open"}, flags=Flags(host="192.168.1.2"))
    anyway = {**KEY, "WEIR_HOST": "0.0.0.0", "WEIR_OPEN_BEYOND_LOOPBACK": "true"}
    assert load_config(env=anyway, flags=Flags(auth_mode="open")).auth.mode == "open"
    with pytest.raises(ConfigError, match=r"^WEIR_AUTH_MODE: auth\.mode: "):
        load_config(env={**KEY, "WEIR_AUTH_MODE": "key"})


SECRETS = {"SECRET_A": "canary-admin-1", "SECRET_B": "canary-client-2", "SECRET_C": "canary-upstream-3"}
SECRET_FILE = (
    "auth: {admin_token: '${SECRET_A}'}\n"
    "keys: [{name: a, secret: '${SECRET_B}', upstream_key: '${SECRET_C}'}]\n"
    "upstreams: {o: {base_url: 'https://api.openai.com/v1', api_key: '${SECRET_C}'}}\n"
    "store: {url: 'postgresql+asyncpg://weir:canary-database-4@db/weir'}\n"
)


@pytest.mark.requirement("S.17", "S.2")
def test_no_secret_is_in_repr_or_in_what_is_shown(tmp_path):
    config = config_of(tmp_path, SECRET_FILE, env=SECRETS)

    for text in (repr(config), str(config), repr(public(config)), f"{config.upstreams} {config.keys} {config.store}"):
        assert "canary" not in text
    assert public(config)["keys"][0]["secret"] == "***"
    assert public(config)["store"]["url"] == "postgresql+asyncpg://weir:***@db/weir"


@pytest.mark.requirement("S.17")
def test_no_secret_is_in_an_error(tmp_path):
    text = SECRET_FILE.replace("name: a,", "nme: a,") + "limits: {body: '${SECRET_A}', depth: '${SECRET_B}'}\n"

    found = problems(tmp_path, text, env=SECRETS)

    assert len(found) == 4
    assert "canary" not in "".join(found)
