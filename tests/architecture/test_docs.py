"""What a policy may say is what the page about policies says."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from policies.health import HealthRules
from policies.settings import (
    Bucket,
    Checkpoints,
    ContextSettings,
    ExtractShape,
    Ingest,
    NoteTaking,
    Recall,
    Summaries,
    Zones,
)
from proxy.cli import main
from proxy.config.lint import LAYERS, SCORERS
from proxy.config.loading import load_config
from proxy.config.presets import preset_documents
from proxy.errors import ProxyError
from proxy.features.custom import check_custom
from proxy.store.chain import GENESIS, AuditEvent, AuditType, linked
from tools import commands, keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
WORDS = frozenset(re.findall(r"[\w.-]+\*?", PAGE))


def test_every_error_that_a_client_may_get_is_on_the_page_about_trouble() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page[page.index("## Clients get an error") : page.index("## Nothing is compacted")]
    kinds = [ProxyError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    rows = [re.match(r"\| (.*?) \| ", line) for line in table.splitlines()]
    told = " ".join(row[1] for row in rows if row)
    for kind in kinds:
        assert f"`{kind.code}`" in told, kind
        assert str(kind.status) in told or kind.status == 409, kind  # 409 is the management API's


@pytest.mark.requirement("A0.137", "A0.40")
def test_every_layer_scorer_and_preset_is_on_the_page() -> None:
    assert set(LAYERS) <= WORDS
    assert set(SCORERS) <= WORDS
    assert set(preset_documents()) <= WORDS


@pytest.mark.parametrize("layer", sorted(LAYERS))
def test_every_parameter_of_a_layer_is_on_the_page(layer: str) -> None:
    assert set(LAYERS[layer]) - {name for keys in SCORERS.values() for name in keys} <= WORDS


@pytest.mark.parametrize("scorer", sorted(SCORERS))
def test_every_parameter_of_a_scorer_is_on_the_page(scorer: str) -> None:
    families = {re.sub(r"^(weight|ttl|source)_.*", r"\1_*", name) for name in SCORERS[scorer]}
    assert families <= WORDS


def names(part: type) -> set[str]:
    return {each.name for each in dataclasses.fields(part)}


def in_code() -> set[str]:
    """Words that stand alone between back quotes."""
    return set(re.findall(r"`(\w+)`", PAGE))


@pytest.mark.parametrize(
    "part", [Bucket, Checkpoints, HealthRules, Ingest, NoteTaking, Recall, ExtractShape, Summaries]
)
def test_every_key_of_a_section_is_on_the_page(part: type) -> None:
    assert names(part) <= in_code()


def test_every_key_of_a_policy_is_on_the_page() -> None:
    assert names(ContextSettings) - {"name", "layers"} | {"cascade", "preset", "about"} <= in_code()
    assert {name.removesuffix("_at") for name in names(Zones)} <= WORDS


def test_the_page_of_keys_is_made_from_the_code() -> None:
    assert keys.PAGE.read_text(encoding="utf-8") == keys.page(), "python -m tools.keys"


def test_the_reference_of_commands_is_made_from_the_code() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), "python -m tools.commands"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_examples_of_policies_pass_the_strictest_lint(tmp_path: Path) -> None:
    assert blocks("yaml")
    for text in blocks("yaml"):
        (tmp_path / "weir.yaml").write_text(text)
        ran = CliRunner().invoke(main, ["policy", "lint", "--strict", str(tmp_path / "weir.yaml")])
        assert ran.exit_code == 0, ran.output


LONGEST_SENTENCE = 35
READ = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
READ += [path for path in sorted((ROOT / "docs").rglob("*.md")) if "development" not in path.parts]


@pytest.mark.parametrize("page", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_longer_than_one_can_read_aloud(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )", prose)
    sentences = [each for one in paragraphs for each in re.split(r"(?<=[.?!])[*)]*\s+", " ".join(one.split()))]
    assert [each for each in sentences if len(each.split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "clients").glob("*.md")), ids=lambda path: path.stem)
def test_what_a_clients_page_configures_is_read_by_weir(page: Path, tmp_path: Path) -> None:
    """An upstream's page has a configuration of Weir without a warning, a client's one that its program can parse."""
    found = re.findall(r"^```(yaml|json|toml)( title=\S+)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for language, foreign, text in found:
        if language == "yaml" and not foreign:
            (tmp_path / "weir.yaml").write_text(text)
            assert load_config(tmp_path / "weir.yaml", env={}).warnings == ()
        else:
            assert {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[language](text)


def test_the_example_of_a_function_can_be_named_from_the_folder_weir_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_layers.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)

    assert check_custom("my_layers:newest") is None
    assert check_custom("my_layers:oldest") is not None


def test_every_type_of_row_of_the_audit_is_on_its_page_and_the_page_hashes_as_weir_does() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    table = page[page.index("## Types") : page.index("## Checking")]
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    made: dict[str, Callable[[dict[str, object]], str]] = {}
    exec(example, made)  # the page's own code
    events = [AuditEvent(tenant="t", at=1.5, type=AuditType.SAVE, facts={"n": n}) for n in range(2)]

    assert set(map(str, AuditType)) <= set(re.findall(r"`(\w+)`", table))
    for row in linked(events, seq=0, prev=GENESIS):
        assert made["hash_of"](msgspec.structs.asdict(row) | {"prev": row.prev.hex()}) == row.hash.hex()
