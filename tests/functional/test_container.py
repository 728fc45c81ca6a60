"""The image and the compose file as they are written: built, started, asked and stopped, in a root of their own."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.functional.bare_root import Image, bare_root, can_unshare, dockerfile
from tests.functional.harness import ROOT

pytestmark = [
    pytest.mark.skipif(not can_unshare("--mount", "--net"), reason="this machine gives no namespaces: run it as root"),
    pytest.mark.slow,
]
ASK = """
import json, sys, urllib.error, urllib.request
body = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Hello"}]}
headers = {"content-type": "application/json", "authorization": f"Bearer {sys.argv[1]}"}
asked = urllib.request.Request("http://127.0.0.1:8400/v1/chat/completions", json.dumps(body).encode(), headers)
try:
    print(urllib.request.urlopen(asked).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """What ``docker build .`` makes."""
    with bare_root(tmp_path_factory.mktemp("image"), ROOT) as image:
        image.build(dockerfile((ROOT / "Dockerfile").read_text()))
        yield image


@dataclass
class Container:
    """A running one."""

    image: Image
    env: Mapping[str, str]
    said: list[str]

    def execute(self, *command: str) -> str:
        """What ``docker exec CONTAINER …`` prints."""
        done = self.image.run(command, self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ask(self, key: str) -> int:
        """The status of a chat request with that key."""
        return int(self.execute("python", "-c", ASK, key))

    def until_accepted(self, key: str) -> int:
        """The first status that is neither 401 nor, to whom asks too often, 429: new keys are looked for now and then."""
        return next(status for _ in range(100) if (status := self.ask(key)) not in (401, 429))


@contextmanager
def running(image: Image, env: Mapping[str, str] = {}) -> Iterator[Container]:
    """``docker run``, until the image's own health check says yes; then ``docker stop``, which has to end well."""
    process = subprocess.Popen(
        image.inside([*image.entrypoint, *image.command], env), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    container = Container(image, env, [])
    try:
        for line in process.stderr:
            container.said.append(line.rstrip())
            if "OPENAI_BASE_URL" in line:
                break
        while image.run(image.health, env).returncode:
            assert process.poll() is None, container.said
        yield container
    finally:
        process.send_signal(signal.SIGTERM)
        container.said += process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 0, container.said


def compose(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment and the volumes of the compose file's one service, variables filled in."""

    def filled(match: re.Match[str]) -> str:
        value = environment.get(match[1]) or match[3]
        assert match[2] != ":?" or environment.get(match[1]), match[0]
        return value

    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    assert service["ports"] == ["8400:8400"]
    told: dict[str, Any] = service["environment"]
    return {k: re.sub(r"\$\{(\w+)(:[?-])([^}]*)\}", filled, v) for k, v in told.items()}, service["volumes"]


@pytest.mark.requirement("S.29", "S.30")
def test_the_image_starts_shut_says_how_a_key_is_made_and_takes_it(image: Image) -> None:
    with running(image) as container:
        assert any("nobody may call" in line for line in container.said)
        assert any("docker exec CONTAINER weir keys create --name me" in line for line in container.said)
        assert container.ask("sk-stranger") in (401, 429)

        key = container.execute("weir", "keys", "create", "--name", "me")
        assert container.until_accepted(key) == 200  # by the built-in simulator: nothing names an upstream
        assert container.ask("sk-stranger") in (401, 429)

        owner = container.execute("stat", "-c", "%U", "/data/weir.db")
        assert owner == container.execute("id", "-un") == image.user != "root"
    assert not any(key in line for line in container.said)


@pytest.mark.requirement("S.29")
@pytest.mark.parametrize("mounted", [True, False], ids=["as it stands", "without the file"])
def test_compose_starts_shut_with_the_file_of_all_defaults_and_without(image: Image, mounted: bool) -> None:
    env, volumes = compose({"OPENAI_API_KEY": "sk-operator", "WEIR_KEYS": "me=sk-mine-0123"})
    if mounted:
        for source, target, *_ in (each.split(":") for each in volumes if each.startswith("./")):
            there = image.root / target.lstrip("/")
            there.parent.mkdir(exist_ok=True)
            there.write_bytes((ROOT / source).read_bytes())
    else:
        del env["WEIR_CONFIG"]
    with running(image, env) as container:
        assert container.ask("sk-stranger") in (401, 429)
        assert container.ask("sk-mine-0123") in {502, 503}  # let in; nothing leads to OpenAI from here
        shown = json.loads(container.execute("weir", "doctor", "--values", "--json"))
    assert shown["path"] == (env["WEIR_CONFIG"] if mounted else None)
    assert shown["upstreams"] != {}
    assert not any("sk-operator" in line or "sk-mine" in line for line in container.said)
