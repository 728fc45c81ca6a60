"""All that the simulator's rules find wrong with a request, as far as the request itself shows it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.upstream import Problem, messages_rules
from tests.upstream.responses_rules import (
    OUTPUTS,
    Item,
    apart,
    form,
    is_model,
    is_reasoning,
    items_of,
    kind_of,
    not_found,
    sequence,
)

Body = Mapping[str, Any]


def of_responses(body: Body, *, open_server: bool = False, reasons: Mapping[str, str] | None = None) -> list[Problem]:
    """All that OpenAI would refuse in a request, as far as the request itself shows it; empty for a legal one.

    ``open_server`` judges as vLLM and llama.cpp do, which take more fields and reasoning in plain words; ``reasons``
    is what the server knows of items that were made together, as :func:`reasons_of` finds it in a whole history.
    """
    found = list(form(body, open_server=open_server))
    if found:
        return found
    chained = body.get("previous_response_id") or body.get("conversation")
    items = items_of(body)
    return [*_unstored(body, items), *sequence(items, known=not chained), *apart(items, reasons or {})]


def reasons_of(items: Iterable[Item]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    reason: str | None = None
    for item in items:
        if is_reasoning(item):
            reason = str(item.get("id"))
        elif not is_model(item) and kind_of(item) not in OUTPUTS:
            reason = None
        if reason is not None and is_model(item) and item.get("id"):
            reasons[str(item["id"])] = reason
    return reasons


def _unstored(body: Body, items: Iterable[Item]) -> Iterator[Problem]:
    if body.get("store") is not False:
        return
    for item in items:
        bare = kind_of(item) == "reasoning" and not item.get("encrypted_content") and not item.get("content")
        if bare or kind_of(item) == "item_reference":
            yield not_found(item.get("id"))


def of_messages(body: Body, *, counting: bool = False) -> list[Problem]:
    found = list(messages_rules.form(body, counting=counting))
    if found:
        return found
    return list(
        messages_rules.sequence(body, body["messages"], goes_on=(body.get("thread") or {}).get("type") == "continue")
    )
