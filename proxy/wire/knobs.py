"""Standard fields by which clients already say whether their context may be edited."""

from collections.abc import Mapping
from typing import Any

from policies import ClientEdits
from proxy.wire.raw import Raw, read_value

EDITS = "context_management"
RESULTS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
RESULTS_AT, COMPACT_AT, KEPT = 100_000, 150_000, 3  # what Anthropic does where the client leaves them out


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


def client_edits(fields: Mapping[str, Raw]) -> ClientEdits | None:
    """What the client asks to have taken out of its request by Anthropic's ``context_management``.

    None where it asks for nothing, or for something that is not known here: that is the upstream's to judge.
    """
    asked = read_value(fields[EDITS]) if EDITS in fields else None
    edits = asked.get("edits") if isinstance(asked, dict) else None
    if not isinstance(edits, list) or not edits:
        return None
    values: dict[str, Any] = {}
    for edit in edits:
        read = _EDITS.get(str(edit.get("type"))) if isinstance(edit, dict) else None
        if read is None:
            return None
        values |= read(edit)
    return ClientEdits(**values)


def _results(edit: Mapping[str, Any]) -> dict[str, Any]:
    trigger, excluded = edit.get("trigger"), edit.get("exclude_tools")
    by_uses = isinstance(trigger, dict) and trigger.get("type") == "tool_uses"
    return {
        "results_over" if by_uses else "results_at": _number(trigger, RESULTS_AT),
        "keep": _number(edit.get("keep"), KEPT),
        "at_least": _number(edit.get("clear_at_least"), 0),
        "exclude": frozenset(str(name) for name in excluded) if isinstance(excluded, list) else frozenset(),
    }


def _thinking(edit: Mapping[str, Any]) -> dict[str, Any]:
    return {"thinking": None if edit.get("keep") == "all" else _number(edit.get("keep"), 1)}


def _compact(edit: Mapping[str, Any]) -> dict[str, Any]:
    return {"compact_at": _number(edit.get("trigger"), COMPACT_AT)}


_EDITS = {RESULTS: _results, THINKING: _thinking, COMPACT: _compact}


def _number(value: object, default: int) -> int:
    """The ``value`` of an amount as Anthropic writes it."""
    number = value.get("value") if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else default
