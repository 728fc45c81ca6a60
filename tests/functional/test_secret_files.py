"""Secrets from files: of each variable that the configuration reads, NAME_FILE is a file with its value."""

import os
from pathlib import Path

import pytest

from proxy.config.file import ConfigError
from proxy.config.loading import environment, load_config

SECRET = "sk-of-a-file-0123456789"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WEIR_", "OPENAI_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def test_a_variable_and_one_inside_the_file_are_read_from_files(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weir.yaml"
    path.write_text("upstreams: {main: {base_url: 'http://127.0.0.1:9/v1', api_key: '${OPENAI_API_KEY}'}}")
    for name in ("OPENAI_API_KEY_FILE", "WEIR_ADMIN_TOKEN_FILE"):
        monkeypatch.setenv(name, str(secret))
    config = load_config(path, env=environment())
    assert config.upstreams["main"].api_key.get_secret_value() == SECRET
    assert config.auth.admin_token is not None
    assert config.auth.admin_token.get_secret_value() == SECRET


@pytest.mark.parametrize("kind", ["absent", "folder", "binary"])
def test_a_file_that_cannot_be_read_says_what_to_write(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    monkeypatch.setenv("WEIR_STORE_FILE", str(path))
    with pytest.raises(ConfigError) as caught:
        load_config(env=environment())
    said = str(caught.value)
    assert said.startswith(f"WEIR_STORE_FILE: cannot read {path}")
    assert "name a file that holds the value of WEIR_STORE and nothing else" in said
