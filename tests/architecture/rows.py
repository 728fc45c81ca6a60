"""The requirement rows, and which tests carry them. As a script: prints the rows that no test of an ordinary run carries."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "development" / "requirements.md"
ROW = re.compile(r"^\| ((?:A[0-4]\.|R\.|S\.|D|P)\d+) \| (.*?) \|", re.MULTILINE)


def rows() -> dict[str, str]:
    """Every row's id with the first cell after it."""
    return dict(ROW.findall(CATALOGUE.read_text(encoding="utf-8")))


def marks(*, ordinary: bool = False) -> dict[str, list[str]]:
    """Row ids that tests carry, each with the files that do; of those only that an ``ordinary`` run has."""
    found: dict[str, list[str]] = {}
    for path, tree in _trees():
        soaked = {id(each) for node in _soaked(tree) for each in ast.walk(node)} if ordinary else ()
        for node in ast.walk(tree):
            if id(node) in soaked:
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requirement":
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        found.setdefault(argument.value, []).append(path.name)
    return found


@cache
def _trees() -> list[tuple[Path, ast.Module]]:
    paths = [each for each in sorted((ROOT / "tests").rglob("test_*.py")) if ".cache" not in each.parts]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def _soaked(tree: ast.Module) -> Iterator[ast.AST]:
    """What only a run with time has: a test with the mark, or all of a file that begins with it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _names_soak(node.value):
            yield tree
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_is_soak, node.decorator_list)):
            yield node


def _is_soak(mark: ast.expr) -> bool:
    return isinstance(mark, ast.Name) and mark.id == "soak"


def _names_soak(marks: ast.expr) -> bool:
    return any(isinstance(each, ast.expr) and _is_soak(each) for each in ast.walk(marks))


def main() -> None:
    """Print what is missing, one row a line, and a count."""
    carried, ordinary = marks(), marks(ordinary=True)
    missing = [(row, what) for row, what in rows().items() if row not in ordinary]
    for row, what in missing:
        print(f"{row:8} {what[:100]}{' (only a soak)' * (row in carried)}")
    print(f"{len(missing)} of {len(rows())} rows are carried by no test of an ordinary run")


if __name__ == "__main__":
    main()
