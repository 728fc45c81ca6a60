import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from pydantic import SecretStr

from policies.settings import ContextSettings, Layer, Mode
from policies.strategies.layers import STRATEGIES
from proxy.access.destination import rule_for, upstream_for
from proxy.cli import main
from proxy.config.file import ConfigError, parse_document
from proxy.config.lint import LAYERS
from proxy.config.loading import load_config, public
from proxy.config.presets import policy_values, preset_directory, preset_documents, with_policy
from proxy.config.values import Config, Flags

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


def test_an_unknown_key_fails_with_file_line_path_and_the_nearest_name(tmp_path):
    text = "listen:\n  port: 8400\nupstreams:\n  openai:\n    base_ur: https://api.openai.com/v1\n"

    assert problems(tmp_path, text) == [
        "weir.yaml:5: upstreams.openai.base_ur: unknown key; did you mean base_url?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listenn: {}\n", "weir.yaml:1: listenn: unknown key; did you mean listen?"),
        ("listen: {port: lots}\n", "weir.yaml:1: listen.port: should be a whole number"),
        ("listen: {port: 70000}\n", "weir.yaml:1: listen.port: should be less than or equal to 65535"),
        ("listen: 8400\n", "weir.yaml:1: listen: should be a mapping"),
        ("models: {match: a}\n", "weir.yaml:1: models: should be a list"),
        ("models:\n  - {window: 8192}\n", "weir.yaml:2: models[0]: match is missing"),
        ("models:\n  - {match: a, windw: 1}\n", "weir.yaml:2: models[0].windw: unknown key; did you mean window?"),
        ("keys: [{name: a, secret: 123456789}]\n", "weir.yaml:1: keys[0].secret: should be text (put it in quotes)"),
        ("store: {content: some}\n", "weir.yaml:1: store.content: should be 'full' or 'digest'"),
        ("store: {retention: 3 weeks}\n", "weir.yaml:1: store.retention: should be like 30d"),
        ("store: {retention: .inf}\n", "weir.yaml:1: store.retention: should be a finite number"),
        ("limits: {grace: inf}\n", "weir.yaml:1: limits.grace: should be a finite number"),
        ("limits: {body: 32MiX}\n", "weir.yaml:1: limits.body: should be like 512KiB or 32MiB"),
        ("- a\n", "weir.yaml:1: should be a mapping of keys to values"),
        ("a: [1\n", "weir.yaml:2: not YAML"),
        ("window: 1\nwindow: 2\n", "weir.yaml:2: window: stands here twice"),
        ("models: &a [*a]\n", "weir.yaml:1: *a stands within itself"),
        ("default_policy: balancd\n", "weir.yaml:1: default_policy: no policy balancd; did you mean balanced?"),
        (
            "policies: {a: {preset: balancd}}\n",
            "weir.yaml:1: policies.a.preset: no preset balancd; did you mean balanced?",
        ),
        ("policies: {a: {headrom: 0.1}}\n", "weir.yaml:1: policies.a.headrom: unknown key; did you mean headroom?"),
        (
            "policies: {a: {headroom: 5}}\n",
            "weir.yaml:1: policies.a.headroom: 5 are tokens; a share is written as 0.05",
        ),
        (
            "policies:\n a:\n  cascade:\n   - {layer: evct}\n",
            "weir.yaml:4: policies.a.cascade[0].layer: no layer evct;",
        ),
        ("policies:\n a:\n  cascade: [{at: 0.5}]\n", "weir.yaml:3: policies.a.cascade[0]: layer is missing"),
        ("policies:\n a:\n  zones: {red_at: x}\n", "weir.yaml:3: policies.a.zones.red_at: should be a number"),
        ("policies:\n a:\n  zones: {red_at: 0.1}\n", "weir.yaml:3: policies.a.zones: each zone should start"),
        ("policies:\n a: {name: b}\n", "weir.yaml:2: policies.a.name: unknown key"),
        ("upstreams: {a: {base_url: 'x:y'}}\n", "weir.yaml:1: upstreams.a.base_url: should be an address like"),
        ("upstreams: {a: {base_url: 'https://k:s@h/v1'}}\n", "weir.yaml:1: upstreams.a.base_url: should have no user"),
        ("upstreams: {a: {kind: openai}}\n", "weir.yaml:1: upstreams.a: kind openai needs base_url"),
        ("upstreams: {a: {kind: litellm}}\n", "weir.yaml:1: upstreams.a: kind litellm needs provider"),
        ("models: [{match: a, upstream: opnai}]\n", "weir.yaml:1: models[0].upstream: no upstream opnai; did you mean"),
        ("store: {url: weir.db}\n", "weir.yaml:1: store.url: should look like"),
    ],
)
def test_a_wrong_value_fails_with_its_place(tmp_path, text, expected):
    assert problems(tmp_path, text)[0].startswith(expected)


def test_all_faults_are_reported_at_once(tmp_path):
    text = "listen: {prot: 1, port: x}\nlimits: {depth: 0}\n"

    assert [problem.split(":")[2].strip() for problem in problems(tmp_path, text)] == [
        "listen.prot",
        "listen.port",
        "limits.depth",
    ]


def test_a_file_that_is_not_there_or_no_text_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml", env={})
    (tmp_path / "weir.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: not UTF-8"):
        load_config(tmp_path / "weir.yaml", env={})


@pytest.mark.requirement("A0.24")
def test_a_zone_named_without_its_start_names_the_start(tmp_path):
    found = problems(tmp_path, "policies:\n  mine:\n    zones: {yellow: 0.5}\n")

    assert found == ["weir.yaml:3: policies.mine.zones.yellow: unknown key; did you mean yellow_at?"]


def test_a_key_of_a_policy_that_has_gone_says_what_to_do_instead(tmp_path):
    found = problems(tmp_path, "policies:\n  mine:\n    evaluate: {sample: 0.1}\n")

    assert found == [
        "weir.yaml:3: policies.mine.evaluate: this key has gone; weir evaluate measures recorded conversations"
    ]


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


def test_a_wrong_value_of_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match=r"^WEIR_PORT: listen\.port: should be a whole number"):
        load_config(env={"WEIR_PORT": "many"})
    with pytest.raises(ConfigError, match=r"^--policy: default_policy: no policy balancd; did you mean balanced"):
        load_config(env={}, flags=Flags(policy="balancd"))


def test_the_file_may_be_named_by_the_environment(tmp_path):
    path = written(tmp_path, "listen: {port: 1}\n")

    assert load_config(env={"WEIR_CONFIG": str(path)}).listen.port == 1


def test_without_file_upstream_or_key_weir_stands_before_its_simulator(tmp_path):
    assert load_config(env={}).simulate
    assert load_config(env={}).upstreams == {}
    assert not load_config(env=KEY).simulate
    assert not load_config(env={"WEIR_UPSTREAM": "http://127.0.0.1:1/v1"}).simulate
    assert not load_config(env={}, flags=Flags(upstream="http://127.0.0.1:1/v1")).simulate
    assert not config_of(tmp_path, "").simulate
    put = load_config(env={}).with_upstream("http://127.0.0.1:7/v1/")
    assert upstream_for(put, "m").base_url == "http://127.0.0.1:7/v1"
    assert not put.simulate


def test_the_key_of_the_environment_goes_to_the_one_upstream():
    config = load_config(env=KEY, flags=Flags(upstream="http://127.0.0.1:9000/v1"))

    assert upstream_for(config, "m").api_key.get_secret_value() == KEY["OPENAI_API_KEY"]
    assert not upstream_for(config, "m").passes_key
    assert upstream_for(load_config(env={"WEIR_UPSTREAM": "http://127.0.0.1:1/v1"}), "m").passes_key


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


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("https://api.openai.com/v1", "https://api.openai.com/v1"),
        ("https://api.openai.com/v1/", "https://api.openai.com/v1"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("https://h.example/api/openai/v2", "https://h.example/api/openai/v2"),
    ],
)
def test_a_base_url_is_kept_without_the_slash_at_its_end(base, expected):
    config = load_config(env={}, flags=Flags(upstream=base))

    assert upstream_for(config, "m").base_url == expected


def test_the_origin_has_scheme_host_and_port():
    assert upstream_for(load_config(env=KEY), "m").origin == "https://api.openai.com:443"
    assert upstream_for(load_config(env={"WEIR_UPSTREAM": "http://[::1]:9/v1"}), "m").origin == "http://::1:9"


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


@pytest.mark.requirement("P7")
def test_keys_of_the_environment_stand_beside_those_of_the_file(tmp_path):
    path = tmp_path / "weir.yaml"
    path.write_text("keys: [{name: a, secret: secret-of-a, policy: audit}]\n")

    config = load_config(path, env={**KEY, "WEIR_KEYS": "b=secret-of-b, c=secret=of=c"})

    assert [(key.name, key.secret.get_secret_value(), key.policy) for key in config.keys] == [
        ("a", "secret-of-a", "audit"),
        ("b", "secret-of-b", None),
        ("c", "secret=of=c", None),
    ]
    assert config.places["keys", 2] == "WEIR_KEYS"
    assert load_config(env={**KEY, "WEIR_KEYS": "b=secret-of-b"}).auth.mode == "keys"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("secret-of-b", r"^WEIR_KEYS: should look like name=secret,name2=secret2$"),
        ("b=", r"^WEIR_KEYS: should look like name=secret,name2=secret2$"),
        ("b=tiny", r"^WEIR_KEYS: keys\[0\]\.secret: "),
        ("b=secret-of-b,b=secret-of-c", r"^WEIR_KEYS: keys\[1\]\.name: a second key is called b$"),
    ],
)
def test_keys_of_the_environment_that_cannot_be_used_are_named_without_their_secret(given, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        load_config(env={**KEY, "WEIR_KEYS": given})

    assert "secret-of-b" not in str(raised.value)
    assert "tiny" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "[::1]"])
def test_loopback_has_many_names(host):
    assert load_config(env=KEY, flags=Flags(host=host)).listen.loopback


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


@pytest.mark.parametrize(
    ("key", "given", "value", "shown"),
    [
        ("store: {retention: %s}", "30d", 2_592_000, "30d"),
        ("store: {retention: %s}", "90s", 90, "90s"),
        ("store: {retention: %s}", "24h", 86_400, "1d"),
        ("limits: {header_timeout: %s}", "0.5s", 0.5, "500ms"),
        ("limits: {headers: %s}", "64KB", 64_000, "64KB"),
        ("limits: {headers: %s}", "64 kib", 65_536, "64KiB"),
        ("store: {max_size: %s}", "10gb", 10**10, "10GB"),
        ("limits: {headers: %s}", "1001", 1001, "1001B"),
    ],
)
def test_times_and_sizes_are_taken_and_printed_as_people_write_them(key, given, value, shown, tmp_path):
    (tmp_path / "weir.yaml").write_text(key % given)
    section, name = key.split(": {")[0], key.split("{")[1].split(":")[0]

    config = load_config(tmp_path / "weir.yaml", env={})
    said = CliRunner().invoke(main, ["doctor", "--values", "--config", str(tmp_path / "weir.yaml")]).stdout

    assert getattr(getattr(config, section), name) == value
    assert re.search(rf"^{section}\.{name} +{shown} ", said, re.MULTILINE)


def test_sizes_and_times_have_units(tmp_path):
    text = "limits: {body: 2MiB, headers: 8KiB, body_timeout: 2m, header_timeout: 500ms}\nstore: {retention: 12h}\n"

    config = config_of(tmp_path, text)

    assert (config.limits.body, config.limits.headers) == (2 * 2**20, 8192)
    assert (config.limits.body_timeout, config.limits.header_timeout, config.store.retention) == (120.0, 0.5, 43200.0)
    assert config_of(tmp_path, "store: {retention: null}\n").store.retention is None
    assert config_of(tmp_path, "store: {retention: 1e6}\n").store.retention == 1_000_000


def test_a_section_without_content_is_the_default(tmp_path):
    text = "listen:\nkeys:\nmodels:\npolicies:\nupstreams:\nlimits:\n  body: 1MB\n"

    config = config_of(tmp_path, text)

    assert config.listen.port == 8400
    assert config.keys == ()


def test_the_preset_balanced_is_exactly_the_defaults_of_the_code():
    assert load_config(env=KEY).policies["balanced"] == ContextSettings()


def test_a_preset_file_writes_every_key_there_is():
    data = preset_documents()["balanced"].data

    assert set(data) - {"about"} == set(policy_values(ContextSettings())) - {"name"}


@pytest.mark.requirement("A1.5")
def test_the_policy_off_is_balanced_with_its_mode_off(tmp_path):
    expected = ContextSettings(name="off", mode=Mode.OFF)

    assert load_config(env=KEY).policies["off"] == expected
    assert config_of(tmp_path, "default_policy: off\n").policy() == expected


def test_presets_are_found_beside_the_code():
    assert preset_directory().resolve() == ROOT / "config" / "presets"
    assert {"balanced", "off"} <= set(preset_documents())


@pytest.mark.requirement("A1.4")
def test_a_policy_is_its_preset_with_overrides(tmp_path):
    text = (
        "policies:\n"
        "  support:\n"
        "    preset: balanced\n"
        "    mode: observe\n"
        "    summarizer: {model: gpt-5-mini}\n"
        "    zones: {orange_at: 0.70}\n"
        "    cascade:\n"
        "      - {layer: evict, at: 0.75, stop_at: 0.6, params: {protect_steps: 3}}\n"
        "      - {layer: compact}\n"
        "  bare:\n"
        "  balanced: {headroom: 0.1}\n"
    )

    config = config_of(tmp_path, text)

    support = config.policies["support"]
    assert (support.name, support.mode, support.summarizer) == ("support", Mode.OBSERVE, "gpt-5-mini")
    assert (support.zones.yellow_at, support.zones.orange_at) == (0.50, 0.70)
    assert support.layers == (
        Layer(strategy="evict", at=0.75, stop_at=0.6, params={"protect_steps": 3}),
        Layer(strategy="compact"),
    )
    assert support.shapes == ContextSettings().shapes
    assert config.policies["bare"] == ContextSettings(name="bare")
    assert config.policies["balanced"].headroom == 0.1


def test_what_is_shown_of_a_policy_can_be_written_back(tmp_path):
    config = config_of(
        tmp_path, "policies: {a: {headroom: 0.07, cascade: [{layer: evict, params: {protect_steps: 1}}]}}\n"
    )
    shown = {key: value for key, value in policy_values(config.policies["a"]).items() if key != "name"}

    again = config_of(tmp_path, yaml.safe_dump({"policies": {"a": shown}}))

    assert again.policies["a"] == config.policies["a"]


def test_window_and_summarizer_of_the_command_line_reach_every_policy(tmp_path):
    text = "policies: {a: {window: 1000, summarizer: own}, b: {}}\n"

    config = config_of(tmp_path, text, flags=Flags(window=8192, summarizer="same"))

    assert (config.policy("a").window, config.policy("a").summarizer) == (8192, "own")
    assert (config.policy("b").window, config.policy("b").summarizer) == (8192, "same")
    with pytest.raises(KeyError):
        config.policy("c")


@pytest.mark.requirement("A0.45")
def test_a_policy_is_replaced_in_a_running_configuration():
    config = load_config(env=KEY)

    changed = with_policy(config, "team", {"preset": "off"})

    assert changed.policy("team").mode is Mode.OFF
    assert "team" not in config.policies
    with pytest.raises(ConfigError, match=r"^policies\.team\.headrom: unknown key; did you mean headroom\?$"):
        with_policy(config, "team", {"headrom": 1})


def test_little_headroom_is_a_warning_and_still_loads(tmp_path):
    config = config_of(tmp_path, "policies: {a: {headroom: 0.03}}\n")

    assert config.policies["a"].headroom == 0.03
    assert config.warnings == ("policies.a: headroom 3.0% < 5%: an estimate that is off by more overflows",)


def test_a_cascade_may_name_every_strategy_there_is():
    made = set(STRATEGIES)

    assert made == set(LAYERS)


def test_a_configuration_cannot_be_changed():
    config = load_config(env=KEY)

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.listen.port = 1  # type: ignore[misc]


def test_words_that_yaml_takes_for_truth_stay_words():
    document = parse_document("a: off\nb: yes\nc: true\nd: 2024-01-02\n", name="x", env={})

    assert document.data == {"a": "off", "b": "yes", "c": True, "d": "2024-01-02"}
