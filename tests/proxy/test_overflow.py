import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.upstream.overflow import Kind, Verdict, classify, classify_answer, classify_event, plausible_limit
from tests.cases import case_of
from tests.profile import tried

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "overflow_cases.jsonl").read_text().splitlines()]
CORPUS = HERE.parents[2] / "shared" / "data" / "overflow_errors.jsonl"
NUMBERS = ("limit", "prompt", "completion", "requested")
TPM = (
    "Request too large for m on tokens per min (TPM): Limit 30000, Requested 48120. "
    "The input or output tokens must be reduced in order to run successfully."
)

DOUBTFUL = (  # one vLLM build prints the window less max_tokens
    "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens plus 4096 "
    "'max_tokens'. Please reduce one or the other."
)


def error(message: str, **fields: object) -> bytes:
    return json.dumps({"error": {"message": message, **fields}}).encode()


@pytest.mark.requirement("P16", "A2.13", "R.46")
def test_a_wording_is_recognised_with_its_kind_and_its_numbers():
    for case in CASES:
        with case_of(case["id"]):
            verdict = classify(case["status"], case["body"].encode(), window=case.get("window"))
            assert verdict.kind == case["kind"]
            for name in NUMBERS:
                if case["status"] != 200 or name in case:
                    assert getattr(verdict, name) == case.get(name), name
            for flag in ("input_limit", "at_least"):
                if flag in case:
                    assert getattr(verdict, flag) is case[flag]
            if "learn" in case:
                assert plausible_limit(verdict) is None


@pytest.mark.requirement("P16", "R.46")
def test_every_recorded_error_body_of_the_field_is_classified_right():
    if not CORPUS.exists():
        pytest.skip("the corpus of recorded error bodies is not beside the repository")
    wrong = []
    for line in CORPUS.read_text().splitlines():
        row = json.loads(line)
        window = row["limit_tokens"] if row["status"] == 200 else None
        verdict = classify(row["status"], row["body"].encode(), window=window)
        if verdict.is_overflow != row["is_context_overflow"]:
            wrong.append((row["id"], verdict.kind))
        wanted = {name: row[f"{name}_tokens"] for name in NUMBERS if row[f"{name}_tokens"] is not None}
        wrong += [(row["id"], name) for name, number in wanted.items() if getattr(verdict, name) != number]
    assert wrong == []


@pytest.mark.requirement("P16", "R.46")
def test_a_wording_survives_the_envelopes_of_gateways_and_sdks():
    """The same error inside an array, a string, an SDK's dump and a stream, without a helpful status outside."""
    for case in (case for case in CASES if case["status"] == 400 and case["body"].startswith("{")):
        with case_of(case["id"]):
            overflow = case["kind"] in ("context", "completion")
            body = json.loads(case["body"])
            dumped = f"Error code: 400 - {body!r}"
            nested = error(
                "Provider returned error", code=400, metadata={"raw": json.dumps(body), "provider_name": "P"}
            )
            twice = error(json.dumps({"error": {"message": json.dumps(body)}}), code="400")
            for wrapped in (json.dumps([body]).encode(), dumped.encode(), nested, twice):
                assert classify(400, wrapped).is_overflow is overflow, wrapped


@pytest.mark.requirement("A1.16", "P16")
@pytest.mark.parametrize(
    ("reason", "prompt", "completion", "max_tokens", "window", "kind"),
    [
        ("length", 900, 4096, 4096, 128_000, Kind.NONE),  # the cap the client asked for
        ("length", 8000, 100, None, 128_000, Kind.NONE),  # a server default, with room left
        ("length", 8000, 192, 1024, 8192, Kind.COMPLETION),  # the window left less than max_tokens
        ("length", 8000, 192, None, 8192, Kind.COMPLETION),
        ("length", 8000, 192, 192, 8192, Kind.NONE),  # both at once: the client got what it asked for
        ("length", 8150, 0, 1024, 8192, Kind.CONTEXT),  # the upstream cut the prompt to fill the window
        ("length", 4000, 0, 1024, 8192, Kind.NONE),
        ("length", 8150, 0, 0, 8192, Kind.NONE),  # a client that only warms the cache
        ("stop", 9000, 50, 1024, 8192, Kind.CONTEXT),  # accepted in silence
        ("stop", 8000, 50, 1024, 8192, Kind.NONE),
        ("model_context_window_exceeded", 8000, 192, 4096, 8192, Kind.COMPLETION),
        ("model_context_window_exceeded", 9000, 0, 4096, None, Kind.CONTEXT),
        ("tool_calls", 8000, 10, None, None, Kind.NONE),
        (None, 8000, None, None, 8192, Kind.NONE),
        ("length", None, None, None, 8192, Kind.NONE),
    ],
)
def test_an_answer_tells_a_full_window_from_an_ordinary_length_stop(
    reason, prompt, completion, max_tokens, window, kind
):
    verdict = classify_answer(reason, prompt=prompt, completion=completion, max_tokens=max_tokens, window=window)
    assert verdict.kind is kind
    if kind is not Kind.NONE:
        assert verdict.limit == window


@pytest.mark.requirement("P16", "R.46")
@pytest.mark.parametrize("status", [400, 413, 422, 429])
def test_a_request_above_tokens_a_minute_is_no_overflow_under_any_status(status):
    for body in (error(TPM, type="tokens", code="rate_limit_exceeded"), TPM.encode()):
        verdict = classify(status, body)
        assert verdict.kind is Kind.RATE
        assert (verdict.limit, verdict.requested) == (30_000, 48_120)
        assert plausible_limit(verdict) is None


@pytest.mark.requirement("A2.13", "D15")
def test_clamping_is_the_first_cure_where_the_prompt_alone_fits():
    fits = classify(400, error("input length and `max_tokens` exceed context limit: 150000 + 64000 > 200000"))
    assert fits.kind is Kind.COMPLETION
    assert fits.clamp(500) == 49_500
    assert fits.clamp(50_000) is None
    tight = classify(400, error("input length and `max_tokens` exceed context limit: 199900 + 64000 > 200000"))
    assert tight.clamp(99) == 1
    assert tight.clamp(100) is None


@pytest.mark.requirement("R.48", "A2.13")
@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("prompt is too long: 210000 tokens > 200000 maximum", 200_000),
        ("Your request exceeded model token limit: 131072", 131_072),  # one explicit number suffices
        ("input length and max_tokens exceed context limit: 150000 + 64000 > 200000", 200_000),
        ("prompt is too long: 100 tokens > 50 maximum", None),  # no model is that small
        ("Please reduce the length of the messages or completion.", None),
        (
            "The input (3000 tokens) is longer than the model's context length (4096 tokens).",
            None,
        ),  # contradicts itself
        (DOUBTFUL, None),
        ("max_tokens is too large: 9000. This model supports at most 4096 completion tokens", None),
    ],
)
def test_a_limit_is_learned_only_from_numbers_that_make_sense(message, limit):
    assert plausible_limit(classify(400, error(message))) == limit


@pytest.mark.requirement("R.48")
def test_a_limit_for_the_input_alone_says_so():
    verdict = classify(
        400,
        error("Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 280000 tokens."),
    )
    assert verdict.input_limit
    assert plausible_limit(verdict) == 272_000
    assert not classify(400, error("prompt is too long: 210000 tokens > 200000 maximum")).input_limit


PIECES = tuple(
    """maximum context length is |1,|1 |9999999999999 |prompt |input |messages |max_tokens |exceeds |exceeds the models
too long |input tokens |tokens > |1 > |1 + 1 > |输入超过|prompt is too |sum of prompt length |input token count |rate
too large for a |[|{|"|'|\\|\\n|total number of tokens (|&amp;|\ufdfa|\u202f1|(1 tokens) |limit: |at least 1 |x|per
https://a| | .|code: a|max |0|\x00|\u2028|maximum number of |with the requested max input tokens |\uff11|(?:|%
""".replace("\n", " |").split("|")
)


@pytest.mark.requirement("R.47")
def test_hostile_error_text_is_read_in_linear_time():
    """About 2 ms each when measured; the test's own limit ends it where a pattern backtracks, which takes seconds each."""
    bodies = []
    for piece in PIECES:
        text = (piece * 4096)[:4096]
        bodies += [
            error(text),
            text.encode(),
            error(text + " maximum context length is 8192 tokens"),
            error(json.dumps({"message": text})),
        ]
    for body in bodies:
        classify(400, body)
        classify_event(body)


@pytest.mark.requirement("R.47")
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"error":' * 20_000,
        b'{"message":"' + b'\\"{' * 20_000,
        b'{"error":{"code":' + b"9" * 9000 + b"}}",
    ],
)
def test_a_body_that_is_deep_or_endless_is_no_overflow(body):
    assert not classify(400, body).is_overflow
    assert not classify(200, body).is_overflow
    assert not classify_event(body).is_overflow


FIELDS = (
    "error",
    "errors",
    "message",
    "code",
    "type",
    "choices",
    "usage",
    "finish_reason",
    "prompt_tokens",
    "raw",
    "n_ctx",
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(PIECES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@pytest.mark.requirement("R.47", "P16")
@settings(max_examples=tried(25, 300), deadline=None)
@given(
    status=st.integers(),
    body=st.binary(max_size=400) | JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    window=st.none() | st.integers(min_value=1, max_value=2_000_000),
)
def test_no_body_and_no_status_makes_it_raise(status, body, window):
    verdict = classify(status, body, window=window)
    assert isinstance(verdict, Verdict)
    assert isinstance(classify_event(body), Verdict)
    for margin in (0, 100):
        room = verdict.clamp(margin)
        assert room is None or (verdict.is_overflow and room >= 1)
    limit = plausible_limit(verdict)
    assert limit is None or (verdict.is_overflow and limit == verdict.limit)
