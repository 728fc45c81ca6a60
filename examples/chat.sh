#!/bin/sh
# The same with curl: one answer with Weir's headers, then a streamed one.
set -eu
base="${OPENAI_BASE_URL:-http://127.0.0.1:8400/v1}"
key="${OPENAI_API_KEY:-any}"
model="${MODEL:-gpt-5-mini}"

curl -sS -i "$base/chat/completions" -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"What is a weir?\"}]}"
echo
curl -sS -N "$base/chat/completions" -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"What is a weir?\"}]}"
