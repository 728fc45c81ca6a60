import asyncio
import json
from pathlib import Path

import pytest

from policies.quality.prices import Cliff
from policies.settings import ContextSettings
from proxy.access.destination import Caller
from proxy.config.values import ModelRule, UpstreamSettings
from proxy.models.facts import (
    ModelFacts,
    ModelRegistry,
    Probe,
    parse_props,
    parse_show,
    parse_upstream_models,
    read_table,
    table_path,
)
from proxy.models.limits import LearnedLimits, ModelLimitsResolver, limited

ANY = ContextSettings()


@pytest.fixture(scope="module")
def registry() -> ModelRegistry:
    return ModelRegistry()


@pytest.mark.requirement("A1.2")
@pytest.mark.parametrize(
    ("model", "window", "max_input", "max_output"),
    [
        ("gpt-4o", 128_000, None, 16_384),
        ("claude-opus-4-5", 200_000, None, 64_000),
        ("gpt-5", 400_000, 272_000, 128_000),
        ("gpt-5.4", 1_050_000, 922_000, 128_000),
        ("gpt-5.1-codex", 400_000, 272_000, 128_000),
        ("gpt-5-chat-latest", 128_000, None, 16_384),
    ],
)
def test_the_table_tells_window_and_input_limit_apart(registry, model, window, max_input, max_output):
    facts = registry.facts(model, settings=ANY)

    assert (facts.window, facts.max_input, facts.max_output) == (window, max_input, max_output)
    assert facts.source == "table"


@pytest.mark.requirement("A1.2")
def test_every_model_whose_input_limit_is_split_off_is_openais():
    path = table_path()
    assert path is not None
    split = [name for name, facts in read_table(path).items() if facts.max_input is not None]

    assert len(split) > 100
    assert [name for name in split if not any(word in name for word in ("gpt", "chat-latest", "daybreak"))] == []


@pytest.mark.requirement("A0.2")
@pytest.mark.parametrize(
    ("model", "above"),
    [
        ("gemini-2.5-pro", (200_000, 2.0, 1.5)),
        ("gemini-2.5-flash", None),
        ("gpt-5.4", (272_000, 2.0, 1.5)),
        ("gpt-5.4-mini", None),
        ("gpt-6-sol", (272_000, 2.0, 1.5)),
        ("claude-haiku-5-5", (100_000, 5.0, 5.0)),
    ],
)
def test_a_long_prompt_is_dearer_where_the_table_says_so(registry, model, above):
    assert registry.facts(model, settings=ANY).cliff == (None if above is None else Cliff(*above))


def test_a_name_that_several_providers_share_has_the_smallest_window_and_no_price(tmp_path):
    rows = {
        "one/shared": {"mode": "chat", "max_input_tokens": 32_000, "input_cost_per_token": 1e-6},
        "two/shared": {"mode": "chat", "max_input_tokens": 8_000, "input_cost_per_token": 2e-6},
        "three/alone": {"mode": "chat", "max_input_tokens": 16_000, "input_cost_per_token": 3e-6},
    }
    registry = table_of(tmp_path, rows)

    assert registry.known("shared") == ModelFacts(window=8_000, source="table")
    assert registry.known("alone").input_price == 3e-6
    assert registry.known("two/shared").window == 8_000
    assert registry.known("one/shared").window == 32_000


def table_of(tmp_path: Path, rows: dict[str, object], rules: tuple[ModelRule, ...] = ()) -> ModelRegistry:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(rows))
    return ModelRegistry(rules, table=path)


def test_a_model_newer_than_the_table_has_the_smallest_window_of_its_family(registry):
    facts = registry.facts("claude-opus-99", settings=ANY)

    assert (facts.window, facts.source) == (200_000, "family")
    assert registry.facts("gpt-5-chat-2031", settings=ANY).window == 128_000


@pytest.mark.requirement("A2.6")
def test_the_last_resort_is_four_times_the_output_limit_and_says_so(caplog):
    registry = ModelRegistry()

    facts = registry.facts("nobody-knows-it", settings=ANY, max_tokens=8_000)
    registry.facts("nobody-knows-it", settings=ANY, max_tokens=8_000)

    assert (facts.window, facts.source) == (32_000, "last_resort")
    assert [record.message for record in caplog.records] == [
        "no window known for model 'nobody-knows-it': assuming 4 x 8000 output tokens"
    ]


@pytest.mark.requirement("A2.6")
def test_the_last_resort_takes_the_models_output_limit_where_the_request_has_none():
    registry = ModelRegistry([ModelRule(match="x-*", max_output=1_000)])

    assert registry.facts("x-1", settings=ANY).window == 4_000
    assert registry.facts("x-1", settings=ANY, max_tokens=0).window == 4_000
    assert registry.facts("y-1", settings=ANY).window is None


@pytest.mark.requirement("A1.2")
def test_each_source_stands_above_the_next():
    rules = [ModelRule(match="gpt-4o", window=64_000, max_output=2_000)]
    upstream = ModelFacts(window=32_000, max_output=1_000, source="upstream")
    policy = ContextSettings(window=16_000)

    def window(registry: ModelRegistry, learned: int | None = None, **rest: object) -> tuple[int | None, str]:
        facts = limited(registry.facts("gpt-4o", **{"settings": ANY, **rest}), learned)
        return facts.window, facts.source

    assert window(ModelRegistry()) == (128_000, "table")
    assert window(ModelRegistry(), upstream_facts=upstream) == (32_000, "upstream")
    assert window(ModelRegistry(rules), upstream_facts=upstream) == (64_000, "rule")
    assert window(ModelRegistry(rules), upstream_facts=upstream, settings=policy) == (16_000, "policy")
    assert window(ModelRegistry(rules), settings=policy, learned=4_096) == (4_096, "learned")
    assert window(ModelRegistry(rules), settings=policy, learned=20_000) == (16_000, "policy")


def test_a_smaller_window_keeps_the_input_limit_and_a_larger_one_voids_it(registry):
    def limits(window: int) -> tuple[int | None, int | None]:
        facts = registry.facts("gpt-5", settings=ContextSettings(window=window))
        return facts.window, facts.max_input

    assert limits(300_000) == (300_000, 272_000)
    assert limits(100_000) == (100_000, None)
    assert limits(1_000_000) == (1_000_000, None)


def test_an_error_that_names_the_input_limit_teaches_nothing_new(registry):
    facts = limited(registry.facts("gpt-5", settings=ANY), 272_000)

    assert (facts.window, facts.max_input, facts.source) == (400_000, 272_000, "table")


@pytest.mark.requirement("P10")
def test_another_model_in_the_same_conversation_has_its_own_window(registry):
    windows = [registry.facts(model, settings=ANY).window for model in ("claude-sonnet-4-5", "gpt-4-32k")]

    assert windows == [200_000, 32_768]


@pytest.mark.parametrize(
    ("entry", "window", "max_output"),
    [
        ({"id": "m", "object": "model"}, None, None),
        ({"id": "m", "max_model_len": 8192}, 8192, None),
        ({"id": "m", "meta": {"n_ctx_train": 131072, "n_ctx": 2048}}, 2048, None),
        ({"id": "m", "meta": {"n_ctx_train": 131072}}, None, None),
        ({"id": "m", "context_length": 200000, "top_provider": {"max_completion_tokens": 8192}}, 200000, 8192),
        ({"id": "m", "context_length": 200000, "top_provider": {"context_length": 64000}}, 64000, None),
        ({"id": "m", "max_context_length": 32768, "state": "not-loaded"}, 32768, None),
        ({"id": "m", "max_context_length": 32768, "loaded_context_length": 4096}, 4096, None),
        ({"id": "m", "context_window": 131072, "max_completion_tokens": 32768}, 131072, 32768),
        ({"id": "m", "max_model_len": "8192"}, None, None),
        ({"id": "m", "max_model_len": True}, None, None),
        ({"id": "m", "max_model_len": 0, "context_length": -5, "meta": [], "top_provider": "x"}, None, None),
    ],
)
def test_what_servers_say_in_their_list_of_models(entry, window, max_output):
    facts = parse_upstream_models({"object": "list", "data": [entry]}).get("m", ModelFacts())

    assert (facts.window, facts.max_output) == (window, max_output)


def test_prices_of_openrouter_are_text_per_token():
    entry = {"id": "m", "context_length": 1000, "pricing": {"prompt": "0.000003", "completion": "-1", "image": "x"}}

    facts = parse_upstream_models({"data": [entry]})["m"]

    assert (facts.input_price, facts.output_price) == (3e-06, None)


def test_the_window_of_llama_cpp_is_that_of_one_slot():
    answer = {"default_generation_settings": {"n_ctx": 2048, "params": {}}, "total_slots": 4}

    assert parse_props(answer) == ModelFacts(window=2048, source="upstream")


@pytest.mark.parametrize(
    ("answer", "window"),
    [
        (
            {"model_info": {"llama.context_length": 131072}, "parameters": "num_ctx                        16384\n"},
            16384,
        ),
        ({"model_info": {"llama.context_length": 8192}, "parameters": 'stop "x"\nnum_ctx 32768'}, 8192),
        ({"model_info": {"qwen3.context_length": 40960}}, 4096),
        ({"model_info": {"tiny.context_length": 2048}, "parameters": ""}, 2048),
        ({"parameters": "num_ctx 16384"}, 16384),
    ],
)
def test_the_window_of_ollama_is_what_it_allots_not_what_was_trained(answer, window):
    assert parse_show(answer) == ModelFacts(window=window, source="upstream")


SCOPE = "https://h:443 c0ffee m"
HOUR, DAY = 3600.0, 86400.0


def test_one_error_teaches_a_limit_for_an_hour():
    limits = LearnedLimits()

    limits.learn(SCOPE, 8192, now=0.0)

    assert limits.get(SCOPE, now=HOUR - 1) == 8192
    assert limits.get(SCOPE, now=HOUR) is None


def test_a_second_error_that_agrees_confirms_it_for_a_day():
    limits = LearnedLimits()
    limits.learn(SCOPE, 8192, now=0.0)

    row = limits.learn(SCOPE, 8192, now=60.0)

    assert (row.limit, row.seen, row.expires) == (8192, 2, 60.0 + DAY)
    assert limits.get(SCOPE, now=DAY) == 8192


def test_while_it_lasts_the_smaller_limit_holds():
    limits = LearnedLimits()
    limits.learn(SCOPE, 8192, now=0.0)
    limits.learn(SCOPE, 16384, now=1.0)
    assert limits.get(SCOPE, now=2.0) == 8192

    limits.learn(SCOPE, 4096, now=3.0)
    assert limits.get(SCOPE, now=4.0) == 4096
    assert limits.learn(SCOPE, 16384, now=3.0 + HOUR).limit == 16384


@pytest.mark.parametrize("limit", [0, -1, 255, True])
def test_a_limit_that_no_model_has_is_not_learned(limit):
    limits = LearnedLimits()

    assert limits.learn(SCOPE, limit, now=0.0) is None
    assert limits.get(SCOPE, now=0.0) is None


def test_a_limit_holds_for_one_upstream_model_and_account():
    resolver = ModelLimitsResolver(ModelRegistry(), LearnedLimits(), Probe(), lambda *_: None)
    scopes = {
        resolver.scope(
            model,
            upstream=UpstreamSettings(name="u", base_url=f"{origin}/v1"),
            caller=Caller(tenant=tenant, credential=credential),
        )
        for origin in ("https://a:443", "https://b:443")
        for model in ("m", "n")
        for tenant in ("t", "u")
        for credential in (b"c", b"d")  # a new token of the same account
    }

    assert len(scopes) == 8


@pytest.mark.requirement("R.60", "A0.16")
async def test_no_request_is_planned_with_what_was_learned_before_that_is_stored():
    """Else the same request, sent again after a crash, would be planned otherwise."""
    happened = []

    async def learn(**_):
        for _ in range(20):
            await asyncio.sleep(0)
        happened.append("stored")

    resolver = ModelLimitsResolver(ModelRegistry(), LearnedLimits(), Probe(), lambda *_: None, write=learn)
    asked = {
        "settings": ANY,
        "upstream": UpstreamSettings(name="u", base_url="https://api.openai.com/v1"),
        "caller": Caller(tenant="t"),
        "max_tokens": None,
    }
    before = await resolver.resolve_limits("gpt-4o", **asked)
    resolver.calibrate(before.counted, estimated=10_000, reported=12_000)
    after = await resolver.resolve_limits("gpt-4o", **asked)
    happened.append("planned")
    assert after.budget.ratio > before.budget.ratio
    assert happened == ["stored", "planned"]
