"""Every policy of the cookbook passes the strictest lint, and is a policy that the README's and the docs' words lead to."""

import re

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.config.loading import load_config
from tests.functional.harness import ROOT

PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
SNIPPETS = [
    (part.partition("\n")[0], text)
    for part in PAGE.split("\n## ")
    for text in re.findall(r"^```yaml\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
]


def lint(path: str) -> Result:
    return CliRunner().invoke(main, ["policy", "lint", "--strict", path])


def test_there_is_one_for_each_situation() -> None:
    titles = [title for title, _ in SNIPPETS]
    wanted = ("A coding agent", "A support chat", "Research", "Voice", "A small local model")

    assert [title for title in titles if title in wanted] == list(wanted)
    assert len(SNIPPETS) == PAGE.count("```yaml")


@pytest.mark.parametrize(("title", "text"), SNIPPETS, ids=[title for title, _ in SNIPPETS])
def test_a_snippet_passes_the_strictest_lint_and_weir_starts_with_it(title: str, text: str, tmp_path) -> None:
    path = tmp_path / "weir.yaml"
    path.write_text(text)

    done = lint(str(path))

    assert (done.exit_code, done.stderr) == (0, ""), title
    config = load_config(path, env={})
    assert all(config.policy(name) for name in re.findall(r"^  ([\w-]+):$", text, re.MULTILINE))
