"""Which blocks go: lowest score first, enough of them, not more than it takes."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.messages import answered_calls, units
from policies.scoring.eviction import Block, ContentType, Selection, scorer, select
from policies.scoring.redundancy import last_references
from policies.text.gist import placeholder
from policies.tokens import CHARS4
from tests.policies.play import assistant, step, system, talk, user, words

PLACEHOLDER = 50


def fifty(block: Block) -> int:
    return PLACEHOLDER


def nothing(block: Block) -> int:
    return 0


def block(index: int, tokens: int, *, keep: bool | None = None) -> Block:
    return Block(
        index=index,
        id=f"{index:032x}",
        kind=ContentType.TOOL_RESULT,
        tokens=tokens,
        age=1,
        idle=1,
        references=0,
        keep=keep,
    )


def scored(*rows: tuple[int, float]) -> list[tuple[Block, float]]:
    """Blocks of so many tokens with their scores, in the order of the array."""
    return [(block(i, tokens), score) for i, (tokens, score) in enumerate(rows)]


def indices(selection: Selection) -> list[int]:
    return [b.index for b in selection.chosen]


SCORED = st.lists(
    st.tuples(
        st.integers(1, 3_000),
        st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.51, 1.0])),
        st.sampled_from([None, None, None, None, False, True]),
    ),
    max_size=30,
).map(lambda rows: [(block(i, tokens, keep=keep), score) for i, (tokens, score, keep) in enumerate(rows)])
COSTS = st.sampled_from([nothing, fifty, lambda b: b.tokens // 3, lambda b: 10 + 7 * (b.index % 20)])
FREE = st.integers(-10, 20_000)
BANDS = st.sampled_from([0.0, 0.02, 0.3])

# -- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.44")
def test_the_lowest_scores_go_first_until_enough_is_freed() -> None:
    found = select(scored((300, 0.9), (300, 0.1), (300, 0.5), (300, 0.3)), free=500, cost=fifty)
    assert indices(found) == [1, 3]
    assert found.freed == 500


@pytest.mark.requirement("A0.34")
def test_what_is_marked_to_be_kept_is_never_chosen() -> None:
    pairs = [(block(0, 900, keep=True), 0.0), (block(1, 300, keep=False), 0.9)]
    found = select(pairs, free=1_000, cost=fifty)
    assert indices(found) == [1]
    assert found.freed == 250


# -- the demonstration of the catalogue ------------------------------------------------------------------------------

FINDING, READING, LISTING = 0, 1, 2
FOUND = "axios is imported in 14 files; src/api/client.ts wraps it with an interceptor for token refresh.\n" + words(
    422, "import"
)


def demonstration() -> list[tuple[Block, float]]:
    """A finding that everything refers to, a long reading, and an irrelevant listing, which is the newest."""
    transcript = talk(
        system("You migrate code."),
        user("Replace axios by fetch."),
        *step(FOUND, tool="grep", arguments='{"pattern": "import axios"}'),
        *step(words(2_796, "const"), tool="read_file", arguments='{"path": "src/legacy/bundle.js"}'),
        assistant("The wrapper in src/api/client.ts decides it, the bundle is generated."),
        assistant("I start with src/api/client.ts and keep its token refresh."),
        *step(words(116, "photo"), tool="list", arguments='{"path": "assets"}'),
        assistant("Now `src/api/client.ts` is migrated."),
    )
    references = last_references(transcript, answered_calls(transcript, units(transcript.messages, transcript.head)))
    rows = {3: (5, 0.8), 5: (4, 0.4), 9: (1, 0.02)}  # age in steps, relevance to the user's message
    by = scorer("hybrid")
    blocks = [
        Block(
            index=n,
            id=transcript.messages[i].digest.hex(),
            kind=ContentType.TOOL_RESULT,
            tokens=transcript.messages[i].tokens,
            age=age,
            idle=6 - (references[i].step or 6 - age),
            references=references[i].count,
            semantic=semantic,
        )
        for n, (i, (age, semantic)) in enumerate(rows.items())
    ]
    assert [b.tokens for b in blocks] == [450, 2_800, 120]
    assert [b.references for b in blocks] == [3, 0, 0]
    return [(b, by.score(b)) for b in blocks]


@pytest.mark.requirement("A0.54", "A0.39")
def test_a_finding_that_has_to_go_stays_in_its_placeholder() -> None:
    pairs = demonstration()
    found = select(pairs, free=3_000, cost=fifty)
    assert indices(found) == [LISTING, READING, FINDING]
    line = placeholder(FOUND, tool="grep", arguments='{"pattern": "import axios"}', ref="0" * 12, counter=CHARS4)
    assert CHARS4.count(line) <= PLACEHOLDER
    assert "axios is imported in 14 files" in line


# -- what holds for every list ---------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.44", "A0.55")
@given(SCORED, FREE, COSTS, BANDS)
def test_selection_never_stops_short_and_changes_nothing(
    pairs: list[tuple[Block, float]], free: int, cost: Callable[[Block], int], band: float
) -> None:
    before = deepcopy(pairs)
    found = select(pairs, free=free, cost=cost, band=band)
    assert pairs == before
    assert found.freed == sum(b.tokens - cost(b) for b in found.chosen)
    paying = {b.index for b, _ in pairs if b.keep is not True and b.tokens > cost(b)}
    assert set(indices(found)) <= paying
    assert len(set(indices(found))) == len(found.chosen)
    if found.freed < free:
        assert set(indices(found)) == paying
    by_index = {b.index: score for b, score in pairs}
    order = [(by_index[i], i) for i in indices(found)]
    assert order == sorted(order)


@pytest.mark.requirement("A0.44", "A0.54")
@given(SCORED, FREE, COSTS, BANDS)
def test_nothing_of_value_is_chosen_that_could_be_spared(
    pairs: list[tuple[Block, float]], free: int, cost: Callable[[Block], int], band: float
) -> None:
    found = select(pairs, free=free, cost=cost, band=band)
    scores = {b.index: score for b, score in pairs}
    for one in found.chosen:
        if scores[one.index] > 0.0:
            assert found.freed - (one.tokens - cost(one)) < free


@pytest.mark.requirement("A0.44")
@given(SCORED, FREE, COSTS, BANDS, st.randoms(use_true_random=False))
def test_the_order_of_the_blocks_and_asking_twice_change_nothing(
    pairs: list[tuple[Block, float]],
    free: int,
    cost: Callable[[Block], int],
    band: float,
    random: object,
) -> None:
    found = select(pairs, free=free, cost=cost, band=band)
    shuffled = [*pairs]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert select(tuple(shuffled), free=free, cost=cost, band=band) == found


@given(SCORED, FREE, BANDS)
def test_the_cost_of_a_block_is_asked_at_most_once(pairs: list[tuple[Block, float]], free: int, band: float) -> None:
    asked: list[int] = []

    def cost(one: Block) -> int:
        asked.append(one.index)
        return PLACEHOLDER

    select(pairs, free=free, cost=cost, band=band)
    assert len(asked) == len(set(asked))


def _fewest(tokens: Sequence[int], free: int) -> int:
    sizes = range(len(tokens) + 1)
    return next(n for n in sizes for chosen in combinations(tokens, n) if sum(chosen) >= free)


@pytest.mark.requirement("A0.44")
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.data())
def test_among_equals_no_smaller_set_would_do(tokens: list[int], data: st.DataObject) -> None:
    free = data.draw(st.integers(1, sum(tokens)))
    found = select(scored(*((n, 0.5) for n in tokens)), free=free, cost=nothing)
    assert len(found.chosen) == _fewest(tokens, free)
