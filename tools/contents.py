"""What a change of a lock brings into site-packages that runs or hides by itself.

    python tools/contents.py OLD NEW        # two locks, or two folders of wheels or site-packages

Of two locks only what differs is downloaded, by its hash. New .pth files, compiled modules, entry
points and top-level modules are printed, each with its package; a person reads them before the lock
is committed.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PIN = re.compile(r"^([\w.-]+(?:\[[^]]*\])?==\S+)((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
DOWNLOAD = (
    "download -q --disable-pip-version-check --no-deps --require-hashes --only-binary :all:".split()
)


def pins(lock: Path) -> dict[str, str]:
    """Each release that a lock names, with its whole entry."""
    return {match[1]: match[0] for match in PIN.finditer(lock.read_text())}


def contents(folder: Path) -> set[str]:
    """What matters of the wheels, or of the installed packages, in a folder."""
    found = {line for wheel in folder.glob("*.whl") for line in _of_wheel(wheel)}
    for record in folder.glob("*.dist-info/RECORD"):
        names = [line.rsplit(",", 2)[0] for line in record.read_text().splitlines()]
        entries = record.with_name("entry_points.txt")
        found |= set(
            _lines(record.parent.name, names, entries.read_text() if entries.exists() else "")
        )
    return found


def _of_wheel(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entries = next(
            (name for name in names if name.endswith(".dist-info/entry_points.txt")), None
        )
        yield from _lines(wheel.name, names, archive.read(entries).decode() if entries else "")


def _lines(package: str, names: list[str], entries: str) -> Iterator[str]:
    package = re.split(r"-\d", package)[0].lower()
    for name in names:
        top = name.split("/")[0]
        if name.endswith(".pth"):
            yield f"{package}: .pth {name}"
        if re.search(r"\.(so|pyd|dylib)(\.|$)", name):
            yield f"{package}: compiled {re.sub(r'[.](cpython|abi3|cp3)[^/]*', '', name)}"
        if not re.search(r"\.(dist-info|data)$|^\.\.|^__pycache__$|\.pth$", top):
            yield f"{package}: module {re.sub(r'[.].*', '', top)}"
    yield from (
        f"{package}: entry point {line.strip()}" for line in entries.splitlines() if "=" in line
    )


def new(old: Path, fresh: Path) -> set[str]:
    """What is in ``fresh`` and not in ``old``."""
    if old.is_dir():
        return contents(fresh) - contents(old)
    before = pins(old)
    after = pins(fresh)
    with tempfile.TemporaryDirectory() as folder:
        for name, mine, other in (("old", before, after), ("new", after, before)):
            lock = Path(folder, f"{name}.txt")
            lock.write_text("\n".join(entry for pin, entry in mine.items() if pin not in other))
            Path(folder, name).mkdir()
            if lock.stat().st_size:
                subprocess.run(
                    [sys.executable, "-m", "pip", *DOWNLOAD, "-r", lock, "-d", Path(folder, name)],
                    check=True,
                )
        return contents(Path(folder, "new")) - contents(Path(folder, "old"))


if __name__ == "__main__":
    print(
        "\n".join(sorted(new(Path(sys.argv[1]), Path(sys.argv[2])))) or "nothing new runs by itself"
    )
