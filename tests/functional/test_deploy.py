"""What ``deploy/`` has: the chart is rendered and checked against the schemas of its objects, files agree with the code."""

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from proxy.config.loading import load_config
from tests.functional.harness import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "weir"
COMPOSE = DEPLOY / "compose"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KUBERNETES = "1.31"
POSTGRES = ("secrets.store=postgresql://weir:secret@db/weir", "secrets.openaiApiKey=sk-test")
SQLITE = ("persistence.enabled=true", "replicas=1")
EVERYTHING = (
    *POSTGRES,
    "ingress.enabled=true",
    "ingress.className=nginx",
    "ingress.tlsSecret=weir-tls",
    "autoscaling.enabled=true",
    "serviceMonitor.enabled=true",
    "serviceMonitor.labels.release=prometheus",
    "publicUrl=https://weir.example.com",
)
Object = dict[str, Any]


def helm(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).with_name("helm")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=60)


def rendered(*values: str, upgrade: bool = False) -> dict[str, Object]:
    """The chart's objects by kind."""
    settings = [word for value in values for word in ("--set", value)]
    done = helm("template", "my-weir", CHART, *settings, *(["--is-upgrade"] if upgrade else []))
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def container(objects: dict[str, Object], kind: str = "Deployment") -> Object:
    found: Object = objects[kind]["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("values", [POSTGRES, SQLITE, EVERYTHING], ids=["postgres", "sqlite", "everything"])
def test_every_object_of_the_chart_has_the_form_that_kubernetes_takes(values: tuple[str, ...]) -> None:
    objects = rendered(*values)
    assert {"ConfigMap", "Secret", "Service", "Deployment"} <= objects.keys()
    for kind, each in objects.items():
        if kind != "ServiceMonitor":  # the Prometheus operator's own, whose schema is not Kubernetes'
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_chart_has_what_a_team_needs() -> None:
    objects = rendered(*EVERYTHING)
    assert objects.keys() == {
        "ConfigMap", "Secret", "Service", "Deployment", "Job", "Ingress", "PodDisruptionBudget",
        "HorizontalPodAutoscaler", "ServiceMonitor",
    }  # fmt: skip
    metrics = [each["type"] for each in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    assert metrics == ["Resource", "Pods"], "processor time, and plans that wait"
    assert objects["Job"]["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    assert container(objects, "Job")["args"] == ["db", "migrate"]
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 12 + 30 + 5, "drain, grace, and some more"
    assert objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert rendered(*SQLITE)["Deployment"]["spec"]["strategy"]["type"] == "Recreate"


def test_the_chart_gives_weir_a_configuration_that_it_takes(tmp_path: Path) -> None:
    objects = rendered(*EVERYTHING, "grace=12")
    env = {each["name"]: each["value"] for each in container(objects)["env"]}
    mounted = {each["mountPath"] for each in container(objects)["volumeMounts"]}
    for name, value in env.items():
        if name.endswith("_FILE"):
            assert str(Path(value).parent) in mounted
            assert Path(value).name in objects["Secret"]["stringData"], f"{name} is no key of the Secret"
    path = tmp_path / "weir.yaml"
    path.write_text(objects["ConfigMap"]["data"]["weir.yaml"])
    config = load_config(path, env={**env, "OPENAI_API_KEY": "sk-test", "WEIR_STORE": "postgresql://weir@db/weir"})
    assert (config.limits.grace, config.limits.drain) == (12, 12)
    assert config.upstreams["openai"].api_key.get_secret_value() == "sk-test"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), "where should conversations be stored? Set secrets.store=postgresql://"),
        (("persistence.enabled=true",), "a file of SQLite is for one process: set replicas=1"),
        ((*POSTGRES, *SQLITE), "secrets.store and persistence.enabled are both set"),
        ((*POSTGRES, "replica=3"), "replica"),
        ((*POSTGRES, "replicas=0"), "replicas"),
        (("secrets.store=mysql://db/weir",), "secrets.store"),
        ((*POSTGRES, "publicUrl=weir.example.com"), "publicUrl"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) and each else "",
)
def test_values_that_cannot_work_are_refused_with_what_to_set(values: tuple[str, ...], expected: str) -> None:
    done = helm("template", "my-weir", CHART, *(word for value in values for word in ("--set", value)))
    assert done.returncode != 0
    assert re.sub(r"/", ".", expected) in re.sub(r"/", ".", done.stderr)


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    assert chart["appVersion"] == VERSION
    assert compose["services"]["weir-a"]["image"] == f"weir-proxy:{VERSION}"


def test_the_compose_files_name_only_what_is_there() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    services = compose["services"]
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE / source).exists(), f"{name}: {volume}"
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        assert set(service.get("depends_on", ())) <= services.keys()
    explained = " ".join(re.findall(r"^#.*$", (COMPOSE / "compose.yaml").read_text(), re.MULTILINE))
    for secret in compose["secrets"].values():
        assert secret["file"] in explained, "how it is made is said in the file's head"
    others = " ".join(path.read_text() for path in COMPOSE.rglob("*.*") if path.name != "compose.yaml")
    for host, port in re.findall(r"\b(weir-a|weir-b|jaeger|prometheus):(\d+)", others):
        assert host in services, f"{host}:{port}"


def test_the_compose_configuration_is_one_that_weir_takes() -> None:
    service = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["weir-a"]
    env = {name: str(value) for name, value in service["environment"].items() if "${" not in str(value)}
    config = load_config(COMPOSE / "weir.yaml", env={**env, "WEIR_CONFIG": "", "OPENAI_API_KEY": "sk-test"})
    assert config.auth.mode == "keys"
    assert not config.warnings


def test_the_unit_of_systemd_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "weir.service")
    service = unit["Service"]
    assert service["ExecStart"].endswith("weir serve --config /etc/weir/weir.yaml")
    assert int(service["TimeoutStopSec"]) >= 12 + 30 + 5, "drain, grace, and some more"
    if verify := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [verify, "verify", "--man=no", DEPLOY / "systemd" / "weir.service"], capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if "weir.service" in line and "not executable" not in line]
        assert not said
