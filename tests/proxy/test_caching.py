"""Cached tokens are read in every spelling."""

import json
from typing import Any

import pytest

from proxy.tap import ReportedUsage, read_completion


def usage_of(usage: dict[str, Any]) -> ReportedUsage | None:
    return read_completion(json.dumps({"choices": [], "usage": usage}).encode()).usage


@pytest.mark.requirement("A4.14")
@pytest.mark.parametrize(
    ("usage", "cached", "written"),
    [
        ({"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 896}}, 896, None),
        ({"prompt_tokens": 1000, "prompt_cache_hit_tokens": 640, "prompt_cache_miss_tokens": 360}, 640, None),
        ({"prompt_tokens": 1000, "prompt_tokens_details": {}, "prompt_cache_hit_tokens": 640}, 640, None),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 7}}, 0, 7),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}, "cache_creation_input_tokens": 8},
            1,
            8,
        ),
        ({"prompt_tokens": 1000, "prompt_tokens_details": None}, None, None),
        ({"prompt_tokens": 1000}, None, None),
    ],
)
def test_cached_tokens_are_read_in_every_spelling(
    usage: dict[str, Any], cached: int | None, written: int | None
) -> None:
    found = usage_of(usage)
    assert found is not None
    assert (found.cached, found.written) == (cached, written)
