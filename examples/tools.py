"""An agent's loop: the whole history is sent each time, and Weir keeps it inside the window."""

import json
import os
from pathlib import Path

from openai import OpenAI

STEPS = int(os.environ.get("STEPS", "12"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the project.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


def read_file(path: str) -> str:
    """What the model gets to see; it may name any path, so only this folder's files are read."""
    name = Path(__file__).with_name(Path(path).name)
    return name.read_text() if name.is_file() else f"{path}: there is no such file here"


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8400/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
    default_headers={"x-weir-conversation": "example-tools"},
)
history = [
    {"role": "system", "content": "You are a careful coding agent."},
    {
        "role": "user",
        "content": (
            "Read the files chat.py, stream.py and tools.py, and say what they have in common."
        ),
    },
]
for step in range(STEPS):
    raw = client.chat.completions.with_raw_response.create(
        model=os.environ.get("MODEL", "gpt-5-mini"), messages=history, tools=TOOLS, max_tokens=512
    )
    message = raw.parse().choices[0].message
    history.append(message.model_dump(exclude_none=True))
    print(f"step {step + 1}: {raw.headers['x-weir-tokens']} {raw.headers['x-weir-actions']}")
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        result = read_file(json.loads(call.function.arguments).get("path", ""))
        history.append({"role": "tool", "tool_call_id": call.id, "content": result})
