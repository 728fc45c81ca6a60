import pytest

from policies.settings import ContextSettings
from proxy.config.values import ModelRule
from proxy.models.facts import ModelFacts, ModelRegistry, parse_show, parse_upstream_models
from proxy.models.limits import LearnedLimits, limited

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


@pytest.mark.parametrize("limit", [0, -1, 255, True])
def test_a_limit_that_no_model_has_is_not_learned(limit):
    limits = LearnedLimits()

    assert limits.learn(SCOPE, limit, now=0.0) is None
    assert limits.get(SCOPE, now=0.0) is None
