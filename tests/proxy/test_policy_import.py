"""Two declarations of other tools become a policy."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main


def run(tmp_path: Path, text: str, *options: str) -> Result:
    (tmp_path / "legacy.yaml").write_text(text)
    return CliRunner().invoke(
        main, ["policy", "import", str(tmp_path / "legacy.yaml"), *options], catch_exceptions=False
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour: red\nmax_context_tokens: 1\n", "error: legacy.yaml:1: colour: unknown key"),
        ("max_context_tokens: many\n", "error: window: should be a whole number"),
        ("compression:\n  cascade: {0.9: sideways}\n", "error: legacy.yaml: nothing was recognised"),
        ("prune_protect: 40000\n", "error: legacy.yaml: nothing was recognised"),
        ("eviction:\n  layers: [{strategy: sliding-windo}]\n", "sliding-windo"),
        ("# nothing\n", "error: legacy.yaml: nothing was recognised"),
    ],
)
def test_what_is_no_key_or_makes_no_policy_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    ran = run(tmp_path, text)

    assert (ran.exit_code, ran.stdout) == (1, "")
    assert said in ran.stderr.replace(f"{tmp_path}/", "")
