"""The pinned digests: of each conversation what was forwarded, what was decided, what is known at its end."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.golden.corpus import SETS, Case

HERE = Path(__file__).parent
Digests = Mapping[str, list[str]]
PARTS = ("bodies", "decisions", "ledger")


def read(name: str) -> dict[str, list[str]]:
    """The pinned digests of a set, none where it was never pinned."""
    path = HERE / f"{name}.json"
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write(name: str, digests: Digests) -> None:
    """Pin the digests of a set, one conversation a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(digests.items())]
    (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def play_set(name: str, *, dump: Path | None = None) -> dict[str, list[str]]:
    """The digests of a set as the planner makes them now."""
    return play_all(SETS[name](), dump=dump)


def play_all(cases: Iterable[Case], *, dump: Path | None = None) -> dict[str, list[str]]:
    """The digests of these conversations."""
    found: dict[str, list[str]] = {}
    for case in cases:
        played = case.play()
        found[case.key] = played.digests
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            text = "\n".join([*played.decisions, "ledger", *played.ledger])
            bodies = b"\n".join(played.bodies).decode(errors="replace")
            (dump / f"{case.key.replace('/', '.')}.txt").write_text(f"{text}\n{bodies}\n", errors="replace")
    return found


def differing(pinned: Digests, played: Digests) -> list[str]:
    """Which conversations come out otherwise, and in what."""
    return [
        f"{key}: {', '.join(name for name, a, b in zip(PARTS, pinned.get(key, [''] * 3), now, strict=True) if a != b)}"
        for key, now in played.items()
        if pinned.get(key) != now
    ]
