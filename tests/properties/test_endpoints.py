"""What is forwarded on ``/v1/responses`` and ``/v1/messages`` breaks no rule of its provider, fits, and goes on from
the request before: for what real clients send, the same made long, and whatever else is legal."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.settings import ContextSettings, Mode
from proxy.config.presets import preset_policies
from proxy.runtime import Runtime
from tests import legal_histories
from tests.captures import everything, sample
from tests.forwarding import CHAT, MESSAGES, RESPONSES, Forwarding, Sent, faults, history, problems, settled, started
from tests.inflated import Steps, all_runs
from tests.profile import SOAK, tried
from tests.properties.test_planning import FEW, random_policies

pytestmark = pytest.mark.slow

NO_RUNS = "the captured runs are not at hand"
PRESETS = sorted(name for name, policy in preset_policies().items() if policy.mode is not Mode.OFF)
WINDOWS = (3_000, 6_000)
BOTH = pytest.mark.parametrize(
    ("write", "path"), [(legal_histories.responses, RESPONSES), (legal_histories.messages, MESSAGES)]
)


async def complaints(
    runtime: Runtime, requests: Iterable[bytes], *, path: str, policy: str, name: str, summaries: bool = True
) -> list[str]:
    """What is wrong with what goes up of a conversation."""
    forwarding = Forwarding(runtime, policy=policy, key=f"sk-{name}-{policy}", path=path, summaries=summaries)
    found: list[str] = []
    before = None
    for number, body in enumerate(requests):
        sent = await forwarding.send(body)
        if sent is None:
            before = None
            continue
        wrong = faults(sent, json.loads(body), before, path=path)
        if not sent.edited and sent.body != body:
            wrong.append("not the client's bytes")
        found += [f"{name} under {policy}, request {number}: {each}" for each in wrong]
        before = sent.value
    return found


@pytest.mark.requirement("P4")
async def test_what_real_clients_send_goes_up_byte_for_byte_where_there_is_room() -> None:
    async with started(1_000_000) as runtime:
        for capture in [*sample(), *list(everything())[:: tried(5, 1)]]:
            path = capture.path.partition("?")[0]
            if path not in (RESPONSES, MESSAGES):
                continue
            body = json.dumps({k: v for k, v in capture.body.items() if k != "context_management"}, indent=1).encode()
            sent = await Forwarding(runtime, key=capture.name, path=path).send(body)
            assert sent is not None, capture.name
            assert sent.body == body, capture.name


def chosen(run: Steps, number: int) -> list[str]:
    """The presets that a run is played under: one each in an ordinary run, all with time."""
    return PRESETS if SOAK else [PRESETS[number % len(PRESETS)]]


@pytest.mark.timeout(tried(300, 3_600))
@pytest.mark.requirement("P3", "P2", "A0.96")
async def test_what_real_clients_send_stays_legal_when_it_is_made_long() -> None:
    runs = all_runs()
    if not runs:
        pytest.skip(NO_RUNS)
    wrong: list[str] = []
    for window in (12_000, 32_000) if SOAK else (16_000,):
        async with started(window) as runtime:
            for number, run in enumerate(runs):
                for policy in chosen(run, number):
                    requests = run.requests(tried(10, 60), words=tried(900, 400))
                    wrong += await complaints(runtime, requests, path=run.path, policy=policy, name=run.name)
    assert wrong == []


@BOTH
@pytest.mark.timeout(tried(300, 3_600))
@pytest.mark.requirement("P3", "P2", "P11")
async def test_every_legal_history_stays_legal(write: object, path: str) -> None:
    wrong: list[str] = []
    for window in WINDOWS:
        async with started(window) as runtime:
            for seed in range(tried(2, 120)):
                policies = PRESETS if SOAK else ["balanced", PRESETS[(seed + window) % len(PRESETS)]]
                for policy in policies:
                    requests = write(seed)  # type: ignore[operator]
                    name, fails = f"seed {seed} in {window}", bool(seed % 3)
                    wrong += await complaints(runtime, requests, path=path, policy=policy, name=name, summaries=fails)
    assert wrong == []


@BOTH
@pytest.mark.requirement("P2", "A0.96")
async def test_sixty_steps_have_at_least_four_fifths_of_their_prompts_in_the_cache(write: object, path: str) -> None:
    """As bytes of the array; all of it between two batches, which :func:`faults` looks at."""
    run = next((each for each in all_runs() if each.path == path and len(each.added) > 3), None)
    if run is None:
        pytest.skip(NO_RUNS)
    sent: list[Sent] = []
    async with started(24_000) as runtime:
        forwarding = Forwarding(runtime, path=path)
        for body in run.requests(tried(60, 60), words=500):
            made = await forwarding.send(body)
            assert made is not None
            assert problems(made.value, path) == []
            sent.append(made)
    arrays = [[json.dumps(each) for each in settled(history(each.value))] for each in sent]
    same = 0
    for old, new in pairwise(arrays):
        shared = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        same += sum(map(len, new[:shared]))
    assert sum(each.acted for each in sent) >= 2
    assert same >= 0.82 * sum(sum(map(len, each)) for each in arrays)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with started(None) as running:
        yield running


NAMES = count()


@pytest.mark.parametrize(
    ("write", "path"),
    [(legal_histories.chat, CHAT), (legal_histories.responses, RESPONSES), (legal_histories.messages, MESSAGES)],
    ids=["chat", "responses", "messages"],
)
@pytest.mark.timeout(tried(300, 3_600))
@pytest.mark.requirement("P3", "P2", "P11")
@settings(FEW, max_examples=tried(8, 1_500))
@given(
    seed=st.integers(0, 2**32),
    policy=random_policies(),
    window=st.sampled_from([2_000, 4_000, 8_000]),
    events=st.integers(1, 16),
    summaries=st.booleans(),
)
async def test_nothing_is_refused_whatever_the_policy_and_the_conversation(
    runtime: Runtime,
    write: Callable[..., Iterator[bytes]],
    path: str,
    seed: int,
    policy: ContextSettings,
    window: int,
    events: int,
    summaries: bool,
) -> None:
    """A policy need not be sensible: what it makes of a request may be poor, and goes up in a form that is legal."""
    runtime.config = replace(runtime.config, policies={"any": replace(policy, window=window)}, default_policy="any")
    forwarding = Forwarding(runtime, policy="any", key=f"sk-{next(NAMES)}", path=path, summaries=summaries)
    for number, body in enumerate(write(seed, events=events)):
        assert problems(json.loads(body), path) == []
        sent = await forwarding.send(body)
        if sent is not None:
            assert problems(sent.value, path) == [], f"request {number}"
            assert sent.edited or sent.body == body
