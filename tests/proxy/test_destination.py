"""Azure's addresses, and the header that a key goes up in."""

import pytest

from proxy.config.values import UpstreamSettings


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
