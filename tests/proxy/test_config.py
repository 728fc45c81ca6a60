import dataclasses
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from policies.settings import ContextSettings
from proxy.access.destination import rule_for, upstream_for
from proxy.config.file import ConfigError, parse_document
from proxy.config.loading import load_config
from proxy.config.values import Config, Flags, public

ROOT = Path(__file__).resolve().parents[2]
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


def without_path(config: Config) -> Config:
    return dataclasses.replace(config, path=None)


def test_the_file_in_the_repository_is_exactly_the_defaults():
    from_file = load_config(ROOT / "config" / "weir.yaml", env=KEY)

    assert without_path(from_file) == load_config(env=KEY)


def test_the_file_in_the_repository_has_every_key_there_is():
    shown = public(load_config(ROOT / "config" / "weir.yaml", env=KEY))
    written_keys = yaml.safe_load((ROOT / "config" / "weir.yaml").read_text())

    def keys(data: object) -> set[str]:
        if not isinstance(data, dict):
            return set()
        return set(data) | {f"{key}.{inner}" for key, value in data.items() for inner in keys(value)}

    computed = {"path", "simulate", "warnings", "upstreams.openai.name"}
    policies = {key for key in keys(shown) if key.startswith("policies.")}
    assert keys(written_keys) == keys(shown) - computed - policies


def test_every_key_of_the_file_in_the_repository_has_a_comment():
    lines = (ROOT / "config" / "weir.yaml").read_text().splitlines()

    bare = [line for line in lines if line.strip() and "#" not in line]

    assert bare == []


@pytest.mark.requirement("A0.24")
def test_a_zone_named_without_its_start_names_the_start(tmp_path):
    found = problems(tmp_path, "policies:\n  mine:\n    zones: {yellow: 0.5}\n")

    assert found == ["weir.yaml:3: policies.mine.zones.yellow: unknown key; did you mean yellow_at?"]


def test_variables_are_read_and_a_missing_one_is_an_error(tmp_path):
    text = "auth:\n  admin_token: ${TOKEN}\nlisten: {port: '${PORT:-9000}'}\n"

    assert problems(tmp_path, text) == [
        "weir.yaml:2: auth.admin_token: the environment has no TOKEN (a default is written ${TOKEN:-default})"
    ]
    config = config_of(tmp_path, text, env={"TOKEN": "0123"})
    assert config.admin_token is not None
    assert config.admin_token.get_secret_value() == "0123"
    assert config.listen.port == 9000


def test_what_a_variable_gives_is_never_read_as_yaml(tmp_path):
    text = "auth: {admin_token: '${T}'}\ntelemetry: {service_name: 'x-${T}'}\n"

    config = config_of(tmp_path, text, env={"T": "null # {a: b}"})

    assert config.telemetry.service_name == "x-null # {a: b}"


def test_an_empty_variable_is_nothing(tmp_path):
    assert config_of(tmp_path, "auth: {admin_token: '${T:-}'}\n", env={"T": ""}).admin_token is None


def test_a_misspelt_variable_is_an_error(tmp_path):
    assert problems(tmp_path, "auth: {admin_token: '${T'}\n") == [
        "weir.yaml:1: auth.admin_token: a variable is written ${NAME}"
    ]


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


def test_every_variable_and_flag_reaches_its_value():
    env = {
        "WEIR_UPSTREAM": "http://127.0.0.1:9000/v1/",
        "WEIR_STORE": "sqlite+aiosqlite:///e.db",
        "WEIR_POLICY": "off",
        "WEIR_HOST": "127.0.0.9",
        "WEIR_PORT": "0",
        "WEIR_WINDOW": "8192",
        "WEIR_SUMMARIZER": "same",
        "WEIR_ADMIN_TOKEN": "admin-token",
    }
    config = load_config(env=env)
    assert upstream_for(config, "any").base_url == "http://127.0.0.1:9000/v1"
    assert (config.store.url, config.default_policy, config.window) == ("sqlite+aiosqlite:///e.db", "off", 8192)
    assert (config.listen.host, config.listen.port, config.summarizer) == ("127.0.0.9", 0, "same")
    assert config.admin_token == SecretStr("admin-token")

    flags = Flags(upstream="http://127.0.0.1:1/v1", policy="balanced", host="::1", port=1, summarizer="none")
    config = load_config(env=env, flags=flags)
    assert upstream_for(config, "any").base_url == "http://127.0.0.1:1/v1"
    assert (config.default_policy, config.listen.host, config.listen.port) == ("balanced", "::1", 1)
    assert config.summarizer is None


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


@pytest.mark.requirement("P7")
def test_the_first_rule_that_matches_chooses_the_upstream(tmp_path):
    text = (
        "upstreams:\n"
        "  openai: {base_url: 'https://api.openai.com/v1'}\n"
        "  local: {base_url: 'http://127.0.0.1:8080/v1'}\n"
        "  claude: {kind: litellm, provider: anthropic, api_key: sk-ant}\n"
        "models:\n"
        "  - {match: 'claude-*', upstream: claude}\n"
        "  - {match: 'local-*', upstream: local, window: 8192}\n"
        "  - {match: 'local-big', upstream: openai}\n"
    )

    config = config_of(tmp_path, text)

    assert upstream_for(config, "claude-9").origin == "litellm:anthropic"
    assert upstream_for(config, "local-big").name == "local"
    assert upstream_for(config, "gpt-4o").name == "openai"


@pytest.mark.requirement("S.29")
def test_without_keys_the_store_decides_on_loopback_and_nobody_is_let_in_beyond_it(tmp_path):
    assert load_config(env=KEY).auth.mode == "auto"
    assert load_config(env=KEY, flags=Flags(host="192.168.1.2")).auth.mode == "keys"
    assert config_of(tmp_path, "listen: {host: 0.0.0.0}\n").auth.mode == "keys"


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


@pytest.mark.parametrize(
    "text",
    [
        "listen: {host: 0.0.0.0}\nauth: {open_beyond_loopback: true}\n",
        "listen: {host: 0.0.0.0}\nauth: {mode: keys}\n",
        "listen: {host: 0.0.0.0}\nkeys: [{name: a, secret: secret-of-a}]\n",
    ],
)
def test_beyond_loopback_weir_wants_keys_or_a_word(tmp_path, text):
    assert config_of(tmp_path, text).listen.host == "0.0.0.0"


def test_keys_in_the_file_close_the_door(tmp_path):
    assert config_of(tmp_path, "keys: [{name: a, secret: secret-of-a}]\n").auth.mode == "keys"
    text = "auth: {mode: open}\nkeys: [{name: a, secret: secret-of-a}]\n"
    assert config_of(tmp_path, text).auth.mode == "open"


def test_two_keys_share_neither_name_nor_secret(tmp_path):
    text = "keys:\n  - {name: a, secret: same-secret}\n  - {name: a, secret: same-secret, policy: of}\n"

    assert problems(tmp_path, text) == [
        "weir.yaml:3: keys[1].name: a second key is called a",
        "weir.yaml:3: keys[1].secret: another key has the same secret",
        "weir.yaml:3: keys[1].policy: no policy of; did you mean off?",
    ]


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


def test_the_preset_balanced_is_exactly_the_defaults_of_the_code():
    assert load_config(env=KEY).policies["balanced"] == ContextSettings()


def test_a_configuration_cannot_be_changed():
    config = load_config(env=KEY)

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.listen.port = 1  # type: ignore[misc]


def test_words_that_yaml_takes_for_truth_stay_words():
    document = parse_document("a: off\nb: yes\nc: true\nd: 2024-01-02\n", name="x", env={})

    assert document.data == {"a": "off", "b": "yes", "c": True, "d": "2024-01-02"}
