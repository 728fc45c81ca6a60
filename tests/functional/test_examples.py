"""The scripts under examples/ run as they are, with the real SDK; the loop with a tool outgrows its window and goes on."""

import asyncio
import json
import os
import sys
from typing import Any

from tests.functional.harness import COUNTER, ROOT, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted

STEPS = 8
FILES = ("tools.py", "stream.py", "chat.py")


def model(asked: Asked) -> Reply:
    """Calls the tool while it has been answered fewer than eight times, then says something."""
    if not asked.target.endswith("/chat/completions"):
        return Reply(404)
    messages = asked.json["messages"]
    answer: dict[str, Any] = completion("All three talk to Weir.", prompt=COUNTER.count(asked.body.decode()))
    done = next((int(m["tool_call_id"][5:]) + 1 for m in reversed(messages) if m["role"] == "tool"), 0)
    if asked.json.get("tools") and done < STEPS:
        arguments = json.dumps({"path": f"examples/{FILES[done % 3]}"})
        call = {"id": f"call_{done}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer["choices"][0]["finish_reason"] = "tool_calls"
    return as_asked(asked, answer)


async def test_the_scripts_run_beside_a_weir_and_the_loop_is_compacted() -> None:
    async with scripted(model) as upstream, weir(upstream.base_url, window=2048) as target:

        async def run(name: str) -> str:
            env = {**os.environ, "OPENAI_BASE_URL": target.base_url, "OPENAI_API_KEY": "any"}
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(ROOT / "examples" / name), env=env, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            return out.decode()

        streamed, looped = await asyncio.gather(run("stream.py"), run("tools.py"))
    assert streamed == "All three talk to Weir.\n"
    assert looped.endswith("All three talk to Weir.\n")
    assert looped.count("step ") == STEPS + 1
    assert "none" in looped.splitlines()[0]
    assert any(word in looped for word in ("compact=", "dedupe=", "ingest_cap="))
