"""Standard fields by which clients already say whether their context may be edited."""

from collections.abc import Mapping

from proxy.wire.raw import Raw, read_value


def wants_no_editing(fields: Mapping[str, Raw]) -> bool:
    """Whether the request forbids editing: ``truncation: "disabled"`` (OpenAI), or OpenRouter's plugin or
    transforms switched off."""
    if "truncation" in fields and read_value(fields["truncation"]) == "disabled":
        return True
    if "transforms" in fields and read_value(fields["transforms"]) == []:
        return True
    plugins = read_value(fields["plugins"]) if "plugins" in fields else None
    return isinstance(plugins, list) and any(
        isinstance(p, dict) and p.get("id") == "context-compression" and p.get("enabled") is False for p in plugins
    )
