"""The page of all keys, made from the dataclasses that a configuration is read into.

python -m tools.keys                    # writes docs/keys.md
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.settings import ContextSettings
from proxy.config.file import adapter
from proxy.config.values import FileValues, in_units, public

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
HEAD = """# All keys

Made from the code by `python -m tools.keys`: what each key may be and its default. What they do
is written in [config/weir.yaml](../config/weir.yaml) and in [policies.md](policies.md); how a file
is read in [configuration.md](configuration.md). `NAME` is a name of yours, `[]` an entry of a list;
a key without a default has to be there.
"""
BOUNDS = {
    "minimum": "at least",
    "ge": "at least",
    "exclusiveMinimum": "above",
    "gt": "above",
    "maximum": "at most",
    "exclusiveMaximum": "under",
}
MAX_DEFAULT = 60

Schema = Mapping[str, Any]


def page() -> str:
    """All of it, as Markdown."""
    parts = [HEAD]
    for title, shape in (
        ("The file", FileValues),
        ("A policy, below `policies.NAME`", ContextSettings),
    ):
        schema = adapter(shape).json_schema()
        defaults = public(shape(), as_written=True)
        rows = _rows(schema["$defs"][shape.__name__], schema["$defs"], "", defaults)
        parts.append(
            f"## {title}\n\n| key | may be | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def _rows(section: Schema, shapes: Mapping[str, Schema], path: str, defaults: Any) -> Iterator[str]:
    for name, key in section["properties"].items():
        if not name:
            continue
        at = f"{path}.{name}" if path else name
        default = defaults.get(name) if isinstance(defaults, dict) else key.get("default", {})
        inner, suffix = _inner(key)
        if inner is not None and shapes[inner]["type"] == "object":
            yield from _rows(shapes[inner], shapes, at + suffix, None if suffix else default)
            continue
        required = name in section.get("required", ())
        yield f"| `{at}` | {_said(key, shapes)} | {'' if required else _written(default)} |"


def _inner(key: Schema) -> tuple[str | None, str]:
    """The section that a key holds, if it holds any, and what stands between the two."""
    for held, suffix in (
        (key, ""),
        (key.get("items", {}), "[]"),
        (key.get("additionalProperties", {}), ".NAME"),
    ):
        if isinstance(held, Mapping) and "$ref" in held:
            return str(held["$ref"]).rpartition("/")[2], suffix
    return None, ""


def _said(key: Schema, shapes: Mapping[str, Schema]) -> str:
    if "$ref" in key:
        return _said(shapes[str(key["$ref"]).rpartition("/")[2]], shapes)
    if "enum" in key:
        kind = ", ".join(f"`{each}`" for each in key["enum"])
    elif "const" in key:
        kind = f"`{key['const']}`"
    elif "anyOf" in key:
        kind = " or ".join(dict.fromkeys(_said(each, shapes) for each in key["anyOf"]))
    elif key.get("type") == "array":
        kind = f"list of {_said(key['items'], shapes)}"
    elif isinstance(key.get("additionalProperties"), Mapping):
        kind = f"mapping to {_said(key['additionalProperties'], shapes)}"
    else:
        kind = {"object": "mapping", "string": "text"}.get(
            key.get("type", ""), key.get("type", "anything")
        )
    bounds = [f"{word} {in_units(key[name], {})}" for name, word in BOUNDS.items() if name in key]
    return ", ".join((kind.replace("integer or number", "number"), *bounds))


def _written(default: object) -> str:
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`" if len(text) <= MAX_DEFAULT and text.strip("*") else "see there"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
