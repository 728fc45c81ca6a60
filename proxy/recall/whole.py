"""The rounds of an answer that comes as a whole."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from proxy.recall.calls import turn_of, without_calls
from proxy.recall.rounds import AskAgain, Ended, Rounds, added_up, next_answer
from proxy.relay import Received
from proxy.tap import read_completion
from proxy.wire.raw import write_value

JOINED = ("content", "reasoning_content", "reasoning")


async def follow_whole(
    received: Received, rounds: Rounds, ask: AskAgain, ended: Ended, *, joins: bool = True
) -> Received:
    """The answer to relay once the model has what it recalled; the same one where it recalled nothing.

    ``joins`` puts what the model said before its calls in front of what it says in the end.
    """
    before: list[Mapping[str, Any]] = []
    turn = None
    while (value := _completion(received, rounds.offer.name)) is not None:
        message = value["choices"][0]["message"]
        turn = turn_of(message, rounds.offer.name)
        if turn is None or not rounds.may_go_on:
            break
        before.append(value)
        received.answer.close()
        ended(received, received.seen)
        received = await next_answer(rounds, turn, ask)
    rounds.finish()
    value = _completion(received, "")
    if value is None or not (before or turn):
        return received
    written = write_value(_final(value, before, rounds.offer.name, joins=joins))
    return replace(received, body=written, seen=read_completion(written), rewritten=True)


def _completion(received: Received, name: str) -> dict[str, Any] | None:
    """A completion that has ``name`` in it; None for anything else."""
    body = received.body
    if body is None or received.answer.status >= 400 or not received.answer.ended or name.encode() not in body:
        return None
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    choices = value.get("choices") if isinstance(value, dict) else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return value if isinstance(first, dict) and isinstance(first.get("message"), dict) else None


def _final(value: dict[str, Any], before: list[Mapping[str, Any]], name: str, *, joins: bool) -> dict[str, Any]:
    """The last completion as the client sees it: without calls of the tool, with the words and tokens of all rounds."""
    choice = dict(value["choices"][0])
    said = dict(choice["message"])
    message = without_calls(said, name)
    if "tool_calls" in said and "tool_calls" not in message and choice.get("finish_reason") == "tool_calls":
        choice["finish_reason"] = "stop"
        message["content"] = message.get("content") or ""
    for key in JOINED if joins else ():
        earlier = [each["choices"][0]["message"].get(key) for each in before]
        texts = [text for text in (*earlier, message.get(key)) if isinstance(text, str) and text.strip()]
        if len(texts) > 1 or (texts and not message.get(key)):
            message[key] = "\n\n".join(texts)
    final = {**value, "choices": [{**choice, "message": message}]}
    usages = [each["usage"] for each in before if isinstance(each.get("usage"), dict)]
    if usages and isinstance(value.get("usage"), dict):
        final["usage"] = added_up(value["usage"], usages)
    return final
