"""The requirement rows, and which tests carry them. As a script: prints the rows that no test carries."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "development" / "requirements.md"
ROW = re.compile(r"^\| ((?:A[0-4]\.|R\.|S\.|D|P)\d+) \| (.*?) \|", re.MULTILINE)


def rows() -> dict[str, str]:
    """Every row's id with the first cell after it."""
    return dict(ROW.findall(CATALOGUE.read_text(encoding="utf-8")))


def marks() -> dict[str, list[str]]:
    """Row ids that tests carry, each with the files that do."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if ".cache" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requirement":
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        found.setdefault(argument.value, []).append(path.name)
    return found


def main() -> None:
    """Print what is missing, one row a line, and a count."""
    carried = marks()
    missing = [(row, what) for row, what in rows().items() if row not in carried]
    for row, what in missing:
        print(f"{row:8} {what[:100]}")
    print(f"{len(missing)} of {len(rows())} rows are carried by no test")


if __name__ == "__main__":
    main()
