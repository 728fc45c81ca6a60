"""How alike texts are: shingles with their known answers, vectors from a real server, and every way to fail."""

import json
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies.effects import Alike, Compare, Failed
from proxy.access.destination import EMBEDDINGS_PATH, by_weir, upstream_for
from proxy.app import running
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.effects.perform import MAX_CHARS, MAX_EMBEDDED_LEN, MAX_LEN, by_shingles, by_vectors
from proxy.errors import UpstreamUnreachable
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import TOKENIZER, prose


def score(one: str, other: str) -> float:
    return by_shingles(Compare((one, other), ((0, 1),))).scores[0]


def status(progress: int, state: str = "running") -> str:
    return (
        f"job 4711 on runner linux-arm is {state}, {progress} % done, queue empty, no errors so far, log in build.log"
    )


# -- shingles --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.35")
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("abcd", "abcd", 1.0),
        ("abcd", "abce", 1 / 3),  # abc in common, bcd and bce not
        ("abcdef", "uvwxyz", 0.0),
        ("a b\n c", "a  b c", 1.0),
        ("ab", "ac", 0.0),
        ("", "a", 0.0),
        ("", "", 1.0),
        ("漢字漢字", "漢字漢字", 1.0),
        ("aäb🙂", "aäb🙃", 1 / 3),
    ],
)
def test_alike_is_the_share_of_common_runs_of_three(one: str, other: str, expected: float) -> None:
    assert score(one, other) == pytest.approx(expected)


@pytest.mark.requirement("A0.35")
def test_polls_that_differ_in_a_number_are_alike_and_other_results_are_not() -> None:
    assert score(status(41), status(57)) > 0.85
    assert score(status(41), prose(20, seed=1)) < 0.3
    long = [prose(4_000, seed=n) for n in range(2)]
    assert score(long[0], long[1]) < 0.5
    assert score(long[0], long[0].replace("proxy 1", "proxy 2")) > 0.85


def test_the_sketch_of_a_long_text_is_within_a_hundredth_of_the_exact_share() -> None:
    rng = random.Random(3)
    words = [f"{rng.getrandbits(64):016x}" for _ in range(4_000)]
    other = [word if rng.random() < 0.95 else f"{rng.getrandbits(64):016x}" for word in words]
    one, two = " ".join(words), " ".join(other)
    exact = [{t[i : i + 8] for i in range(len(t) - 7)} for t in (one, two)]
    assert score(one, two) == pytest.approx(len(exact[0] & exact[1]) / len(exact[0] | exact[1]), abs=0.02)


@given(st.text(alphabet=st.sampled_from("ab \nä漢\ud800"), max_size=40), st.text(alphabet="ab ", max_size=40))
def test_any_two_texts_have_a_score_and_it_is_the_same_both_ways(one: str, other: str) -> None:
    assert 0.0 <= score(one, other) <= 1.0
    assert score(one, other) == score(other, one)
    assert score(one, one) == 1.0


def test_the_work_for_one_question_is_bounded_and_the_newest_texts_are_looked_at() -> None:
    texts = tuple(prose(9_000, seed=1) + f" {n}" for n in range(64))
    assert sum(map(len, texts)) > MAX_CHARS > len(texts[0])
    scores = by_shingles(Compare(texts, tuple((n, n + 1) for n in range(63)))).scores
    assert scores[0] == 0.0
    assert scores[-1] > 0.85
    assert score("x" * (MAX_LEN + 1), "x" * MAX_LEN) == 0.0


# -- vectors ---------------------------------------------------------------------------------------------------------

Embedder = Callable[[list[str]], Any]


def by_length(texts: list[str]) -> dict[str, Any]:
    """Vectors in the plane, turned by a degree for each character; in another order than asked."""
    rows = [{"index": i, "embedding": [1.0, len(t) / 60], "object": "embedding"} for i, t in enumerate(texts)]
    return {"object": "list", "data": rows[::-1], "model": "embed-1"}


class Upstream:
    """An embeddings route whose answer the test chooses."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.answer: Embedder | Response = by_length

    async def embed(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        return self.answer if isinstance(self.answer, Response) else JSONResponse(self.answer(body["input"]))


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, str]]:
    embedder = Upstream()
    app = Starlette(routes=[Route("/v1/embeddings", embedder.embed, methods=["POST"])])
    async with serve(app) as server:
        yield embedder, f"http://127.0.0.1:{server.port}/v1"


async def compared(address: str, effect: Compare, *, patience: float = 5.0) -> object:
    """The reply when a running Weir's own client asks the upstream."""
    config = load_config(None, env={}, flags=Flags(upstream=address, store="sqlite+aiosqlite:///:memory:"))
    telemetry = Telemetry.create(OtelSettings())
    async with running(config, telemetry=telemetry, tokenizer=TOKENIZER) as runtime:
        caller = runtime.keyring.identify({"authorization": "Bearer sk-mine"})
        upstream = upstream_for(runtime.config, "embed-1")
        destination = by_weir(upstream, caller, path=EMBEDDINGS_PATH, model="embed-1")
        send = partial(runtime.upstreams.post, destination)
        return await by_vectors(effect, model="embed-1", send=send, patience=patience)


@pytest.mark.requirement("A0.35", "R.59")
async def test_vectors_are_asked_of_the_named_model_with_the_callers_own_key(upstream: tuple[Upstream, str]) -> None:
    embedder, address = upstream
    reply = await compared(address, Compare(("a" * 60, "b" * 60, "c"), ((0, 1), (0, 2)), "embed-1"))
    assert isinstance(reply, Alike)
    assert reply.scores[0] == pytest.approx(1.0)
    assert reply.scores[1] == pytest.approx((1 + 1 / 60) / (2**0.5 * (1 + 1 / 3600) ** 0.5))
    (asked,) = embedder.asked
    assert asked == {"model": "embed-1", "input": ["a" * 60, "b" * 60, "c"], "encoding_format": "float"}
    assert embedder.keys == ["Bearer sk-mine"]


async def test_many_texts_go_in_several_requests_and_what_no_model_could_read_in_none(
    upstream: tuple[Upstream, str],
) -> None:
    embedder, address = upstream
    texts = (*("x" * (n + 1) for n in range(150)), "y" * (MAX_EMBEDDED_LEN + 1))
    reply = await compared(address, Compare(texts, ((0, 150), *((n, n + 1) for n in range(149)))))
    assert isinstance(reply, Alike)
    assert [len(a["input"]) for a in embedder.asked] == [64, 64, 22]
    assert reply.scores[0] == 0.0
    assert min(reply.scores[1:]) > 0.99


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Response("no such route", 404), "status_404"),
        (Response("{", 200), "not_an_answer"),
        (JSONResponse({"data": []}), "not_an_answer"),
        (JSONResponse({"data": [{"embedding": [1.0]}, {"embedding": [1.0, 2.0]}]}), "not_an_answer"),
        (JSONResponse({"data": [{"embedding": "AAAA"}, {"embedding": "AAAA"}]}), "not_an_answer"),
        (JSONResponse({"data": [{"embedding": []}, {"embedding": []}]}), "not_an_answer"),
    ],
)
async def test_an_answer_that_is_none_is_a_failure(
    answer: Response, reason: str, upstream: tuple[Upstream, str]
) -> None:
    embedder, address = upstream
    embedder.answer = answer
    assert await compared(address, Compare(("a", "b"), ((0, 1),))) == Failed(reason)


async def test_vectors_without_length_are_alike_to_nothing(upstream: tuple[Upstream, str]) -> None:
    embedder, address = upstream
    embedder.answer = JSONResponse({"data": [{"embedding": [0.0]}, {"embedding": [1e308]}]})
    assert await compared(address, Compare(("a", "b"), ((0, 1),))) == Alike((0.0,))


async def test_an_upstream_that_is_not_there_or_does_not_answer_is_a_failure() -> None:
    effect = Compare(("a", "b"), ((0, 1),))

    async def silent(_: bytes) -> tuple[int, bytes]:
        raise UpstreamUnreachable("nobody there")

    assert await by_vectors(effect, model="m", send=silent) == Failed("upstream_unreachable")
    reply = await compared("http://127.0.0.1:9/v1", effect)
    assert reply == Failed("upstream_unreachable")
