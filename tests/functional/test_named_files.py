"""A file that a message only names, by an id: its size is the upstream's knowledge, and Weir learns it from usage."""

from typing import Any

import pytest

from tests.functional.harness import COUNTER, Talk, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted

WINDOW, SIZE = 8_192, 3_000


def naming(file: str, text: str = "What does it say?") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "file", "file": {"file_id": file}}, {"type": "text", "text": text}]}


def counted(asked: Asked) -> Reply:
    """An upstream that knows how long each file is."""
    texts = [str(m["content"]) for m in asked.json["messages"]]
    files = sum(text.count("file_id") for text in texts)
    said = sum(COUNTER.count(text.rpartition("'text': ")[2]) for text in texts)
    return as_asked(asked, completion("Understood.", prompt=said + SIZE * files))


def before(talk: Talk) -> int:
    return int(talk.headers[-1]["x-weir-tokens"].partition("before=")[2].partition(";")[0])


@pytest.mark.requirement("P11")
async def test_what_usage_says_of_a_file_is_its_size_from_then_on_for_this_key_alone() -> None:
    async with scripted(counted) as upstream, weir(upstream.base_url, window=WINDOW) as target:
        talk = Talk(target.client(), [naming("file-a")])
        await talk.ask()
        talk.messages += [{"role": "assistant", "content": "Understood."}, {"role": "user", "content": "And now?"}]
        await talk.ask()
        assert before(talk) == pytest.approx(SIZE, rel=0.05)
        other = Talk(target.client("sk-other"), [naming("file-a")])
        await other.ask()
        assert before(other) < 100
