"""No key of the configuration is dead: each is read by the product, outside the modules that only hold and check it."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

from proxy.config.file import _plain  # the same reading of types that reads files
from proxy.config.values import FileValues

ROOT = Path(__file__).parents[2]
ONLY_HOLD = {"config/loading.py", "config/values.py", "config/file.py"}


def settings(shape: type = FileValues) -> Iterator[tuple[type, str]]:
    """Every dataclass of the file with its fields."""
    hints = typing.get_type_hints(shape, include_extras=True)
    for item in dataclasses.fields(shape):
        kind, inner = _plain(hints[item.name])
        nested = next((each for each in (kind, inner) if dataclasses.is_dataclass(each)), None)
        if nested is not None:
            yield from settings(typing.cast("type", nested))
        yield shape, item.name
