"""One question through Weir with OpenAI's SDK: OPENAI_BASE_URL is the only thing that changes."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8400/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
history = [{"role": "user", "content": "What is a weir?"}]
raw = client.chat.completions.with_raw_response.create(
    model=os.environ.get("MODEL", "gpt-5-mini"), messages=history
)
print(raw.parse().choices[0].message.content)
for name in (
    "x-weir-conversation",
    "x-weir-tokens",
    "x-weir-pressure",
    "x-weir-actions",
    "x-weir-overhead-ms",
):
    print(f"{name}: {raw.headers[name]}")
