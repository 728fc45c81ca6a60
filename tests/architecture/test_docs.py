"""What a policy may say is what the page about policies says."""

import dataclasses
import re
from pathlib import Path

import pytest

from policies.settings import Bucket, ContextSettings, Ingest
from proxy.policy_layers import LAYERS, SCORERS
from proxy.presets import preset_documents

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
WORDS = frozenset(re.findall(r"[\w.-]+\*?", PAGE))


@pytest.mark.requirement("A0.137", "A0.40", "A3.18")
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


def test_every_key_of_a_bucket_and_of_the_ingest_cap_is_on_the_page() -> None:
    keys = {f.name for part in (Bucket, Ingest) for f in dataclasses.fields(part)} - {"sub_agent_cap"}
    assert keys <= WORDS


def test_every_key_of_a_policy_is_on_the_page() -> None:
    internal = {"name", "mode", "note_min", "note_max", "summarizer", "layers", "reserve_floor"}
    assert {f.name for f in dataclasses.fields(ContextSettings)} - internal <= WORDS
