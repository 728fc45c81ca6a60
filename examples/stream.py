"""A streamed answer: chunks come through as the upstream sends them."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8400/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
stream = client.chat.completions.create(
    model=os.environ.get("MODEL", "gpt-5-mini"),
    messages=[{"role": "user", "content": "Say in one sentence what a weir is."}],
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
