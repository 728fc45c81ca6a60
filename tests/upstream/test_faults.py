"""Misbehaviour on demand: each fault as a client sees it on the wire."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.misbehaving import ALL_FAULTS
from tests.upstream import Dialect, RunningSimulator, SimulatorSettings, run_simulator
from tests.upstream.delivery import parse_fault
from tests.wordings import WORDINGS

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "Hello there"}]


@dataclass(frozen=True)
class Words:
    def count(self, text: str) -> int:
        return len(text.split())


@pytest.fixture(scope="module")
def running() -> Iterator[RunningSimulator]:
    settings = SimulatorSettings(window=100, faults=ALL_FAULTS, wordings=WORDINGS)
    with run_simulator(settings, counter=Words()) as simulator:
        yield simulator


def post(
    running: RunningSimulator, model: str, *, stream: bool = False, header: str = "", **more: object
) -> httpx.Response:
    headers = {"x-sim-fault": header} if header else {}
    body = {"model": model, "messages": HELLO, "stream": stream, **more}
    return httpx.post(f"{running.base_url}/chat/completions", json=body, headers=headers, timeout=3)


def test_the_three_ways_to_ask_for_a_fault_are_one(running):
    assert post(running, "fault:503").status_code == 503
    assert post(running, "sim", header="503").status_code == 503
    with run_simulator(SimulatorSettings(fault="503"), counter=Words()) as other:
        assert post(other, "sim").status_code == 503
    assert post(running, "sim").status_code == 200


def test_a_fault_may_be_met_a_number_of_times_only(running):
    assert [post(running, "fault:500@2").status_code for _ in range(4)] == [500, 500, 200, 200]


def test_an_unknown_fault_is_refused_by_name(running):
    answer = post(running, "fault:typo")
    assert answer.status_code == 400
    assert "unknown fault 'typo'" in answer.json()["error"]["message"]


def test_a_rate_limit_says_when_to_come_back_and_is_no_overflow(running):
    answer = post(running, "fault:429:7")
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    client = openai.OpenAI(base_url=running.base_url, api_key="k", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fault:429", messages=HELLO)


def test_latency_comes_before_the_first_byte_and_slow_chunks_between_them(running):
    started = time.monotonic()
    assert post(running, "fault:latency:0.3").status_code == 200
    assert time.monotonic() - started > 0.3
    started = time.monotonic()
    post(running, "fault:slow_chunks:0.02", stream=True)
    assert time.monotonic() - started > 0.2


def test_a_stall_sends_nothing_and_a_stall_in_the_stream_sends_the_beginning(running):
    url = f"{running.base_url}/chat/completions"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={"model": "fault:stall", "messages": HELLO}, timeout=0.2)
    received: list[bytes] = []

    def read(answer: httpx.Response) -> None:
        for piece in answer.iter_bytes():
            received.append(piece)

    body = {"model": "fault:stall_mid_stream:3", "messages": HELLO, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=0.3) as answer, pytest.raises(httpx.ReadTimeout):
        read(answer)
    assert b"".join(received).count(b"data: ") == 3


def test_a_cut_stream_breaks_off_and_an_early_end_looks_clean(running):
    for stream in (True, False):
        with pytest.raises(httpx.RemoteProtocolError):
            post(running, "fault:cut_stream:1", stream=stream)
    early = post(running, "fault:end_early:3", stream=True)
    assert early.text.count("data: ") == 3
    assert "[DONE]" not in early.text
    assert '"finish_reason":"stop"' not in early.text
    undone = post(running, "fault:no_done", stream=True)
    assert '"finish_reason":"stop"' in undone.text
    assert "[DONE]" not in undone.text


def test_an_error_inside_a_200_comes_first_or_after_content(running):
    first = post(running, "fault:error_in_stream", stream=True)
    assert first.status_code == 200
    assert first.text.startswith('data: {"error": {"message": "This model\'s maximum context length is 100 tokens.')
    assert first.text.count("data:") == 1
    later = post(running, "fault:error_in_stream_after_content:3", stream=True)
    assert later.text.count('"delta"') == 3
    assert "context_length_exceeded" in later.text.rpartition("data: ")[2]
    assert post(running, "fault:error_in_stream").json()["error"]["code"] == "context_length_exceeded"
    client = openai.OpenAI(base_url=running.base_url, api_key="k", max_retries=0)
    with client, pytest.raises(openai.APIError, match="maximum context length"):
        list(client.chat.completions.create(model="fault:error_in_stream", messages=HELLO, stream=True))


def test_a_real_overflow_may_be_told_inside_the_stream(running):
    long = [{"role": "user", "content": "w " * 120}]
    fits = post(running, "fault:overflow_in_stream", stream=True)
    assert fits.text.endswith("[DONE]\n\n")
    told = post(running, "fault:overflow_in_stream", stream=True, messages=long)
    assert told.status_code == 200
    assert "your messages resulted in 127 tokens" in told.text


def test_the_window_may_be_smaller_misstated_or_told_in_anothers_words(running):
    long = [{"role": "user", "content": "w " * 120}]
    assert "is 8 tokens" in post(running, "fault:window:8").json()["error"]["message"]
    assert post(running, "fault:wrong_window:64").status_code == 200
    assert "is 64 tokens" in post(running, "fault:wrong_window:64", messages=long).json()["error"]["message"]
    told = post(running, "fault:wording:tgi", messages=long)
    assert told.status_code == 422
    assert told.json()["error_type"] == "validation"


def test_bodies_may_be_empty_broken_or_not_json(running):
    for stream in (True, False):
        empty = post(running, "fault:empty_200", stream=stream)
        assert (empty.status_code, empty.content) == (200, b"")
    broken = post(running, "fault:truncated_json")
    assert broken.status_code == 200
    with pytest.raises(ValueError, match="line 1"):
        broken.json()
    assert post(running, "fault:html").headers["content-type"] == "text/html"
    assert post(running, "fault:204").content == b""


def test_a_redirect_points_where_it_was_told(running):
    answer = post(running, "fault:redirect:http://127.0.0.1:9/x")
    assert (answer.status_code, answer.headers["location"]) == (307, "http://127.0.0.1:9/x")


def test_odd_framing_changes_bytes_and_not_what_the_sdk_reads(running):
    client = openai.OpenAI(base_url=running.base_url, api_key="k", max_retries=0)

    def read(model: str) -> str:
        stream = client.chat.completions.create(model=model, messages=HELLO, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with client:
        plain = read("sim")
        assert read("fault:split_bytes") == plain
        assert read("fault:huge_event:0.1").replace("x" * 104_857, "") == plain
    framed = post(running, "fault:framing", stream=True).content
    assert framed.startswith(b"\xef\xbb\xbf: connected")
    assert b"\r\n\r\n" in framed
    marked = post(running, "fault:separators", stream=True).text
    assert "\u2028\u2029\u0085Understood." in marked


def test_a_fault_that_comes_before_the_window_wins_over_an_overflow(running):
    long = [{"role": "user", "content": "w " * 120}]
    assert post(running, "fault:429", messages=long).status_code == 429
    assert post(running, "fault:cut_stream", messages=long, stream=True).status_code == 400


@pytest.mark.parametrize("dialect", list(Dialect))
def test_outages_have_the_shape_of_the_dialect(dialect):
    with run_simulator(SimulatorSettings(dialect=dialect, fault="500"), counter=Words()) as running:
        path = "/messages" if dialect is Dialect.ANTHROPIC else "/chat/completions"
        body = {"model": "m", "max_tokens": 5, "messages": HELLO}
        answer = httpx.post(running.base_url + path, json=body)
    assert answer.status_code == 500
    kinds = {
        "openai": "server_error",
        "vllm": "InternalServerError",
        "llamacpp": "server_error",
        "anthropic": "api_error",
    }
    assert answer.json()["error"]["type"] == kinds[dialect]


@pytest.mark.parametrize("name", sorted(ALL_FAULTS))
def test_every_fault_is_noted_in_the_ledger_under_its_name(name, running):
    assert parse_fault(f"fault:{name}:1@3", ALL_FAULTS).times == 3
    running.forget()
    body = {"model": f"fault:{name}", "messages": HELLO}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{running.base_url}/chat/completions", json=body, timeout=0.15)
    for _ in range(500):
        if running.ledger and running.ledger[0].fault:
            break
        time.sleep(0.01)
    assert running.ledger[0].fault == name
