"""Azure's addresses, and the header that a key goes up in."""

import json

import pytest

from proxy.access.destination import CHAT, Caller, Route, for_managed, for_relay, route_of
from proxy.config.loading import load_config
from proxy.config.values import Flags, UpstreamSettings
from proxy.errors import InvalidRequest
from proxy.wire.codec import parse_chat

CALLER = Caller(tenant="0" * 32)
JSON = [(b"content-type", b"application/json")]
CHAT_BODY = b'{"messages":[{"role":"user","content":"x"}]}'


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("https://api.anthropic.com/v1", "x-api-key"),
        ("https://NAME.openai.azure.com/openai/v1", "api-key"),
        ("https://name.cognitiveservices.azure.com/openai", "api-key"),
        ("https://api.openai.com/v1", "bearer"),
        ("https://evil-anthropic.com/v1", "bearer"),
        ("https://api.anthropic.com.evil.example/v1", "bearer"),
        ("http://127.0.0.1:8000/v1", "bearer"),
    ],
)
def test_a_key_goes_up_as_the_host_is_known_to_want_it(base: str, expected: str) -> None:
    assert UpstreamSettings(name="a", base_url=base).credential == expected
    assert UpstreamSettings(name="a", base_url=base, auth="bearer").credential == "bearer"


@pytest.mark.requirement("P4")
@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("https://name.openai.azure.com/openai", "/deployments/gpt%2F5/chat/completions"),
        ("https://name.openai.azure.com/openai/v1", "/chat/completions"),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "/chat/completions"),
    ],
)
def test_only_azures_older_addresses_have_the_model_in_the_path(base: str, path: str) -> None:
    config = load_config(env={}, flags=Flags(upstream=base))
    route = route_of("POST", "/openai/deployments/gpt%2f5/chat/completions")
    assert route is not None
    found, request = for_managed(config, CALLER, route, parse_chat(CHAT_BODY))
    assert (found.path, found.model, request.model) == (path, "gpt/5", "gpt/5")
    assert json.loads(request.body) == {**json.loads(CHAT_BODY), "model": "gpt/5"}
    untouched = parse_chat(b'{"model":"gpt/5"}')
    assert for_managed(config, CALLER, CHAT, untouched) == (found, untouched)


@pytest.mark.requirement("P4")
def test_a_body_gets_the_model_of_its_path_and_a_form_may_not_name_another() -> None:
    config = load_config(env={}, flags=Flags(upstream="http://127.0.0.1:9/v1"))
    route = Route(kind="model", path="/audio/transcriptions", model="whisper-1")
    headers = [(b"content-type", b'Multipart/Form-Data; boundary="a-b"')]
    body = b'--a-b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--a-b--\r\n'
    assert for_relay(config, CALLER, route, headers, body)[1] == body
    named = for_relay(config, CALLER, route, JSON, b'{"a":1,"model":"other"}')
    assert (named[0].model, named[1]) == ("whisper-1", b'{"a":1,"model":"whisper-1"}')
    with pytest.raises(InvalidRequest, match="two models"):
        for_relay(config, CALLER, Route(kind="model", path="/audio/speech", model="tts"), headers, body)
