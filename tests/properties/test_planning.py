"""What holds for every array of messages, every window and every history of a conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from policies.draft import ConversationState, replay
from policies.effects import Done, Failed, Flow, Offload, Reply, Summary
from policies.ledger import CONDENSED, Action, Decision, EditKind, PlannedMessage
from policies.limits import BUCKETS, BudgetUnreachable, TokenBudget, divide
from policies.messages import Message, ToolCall, Transcript, protect
from policies.planner import plan, trim
from policies.settings import Bucket, ContextSettings, Ingest, Layer, OnOverflow, Param
from policies.strategies.layers import STRATEGIES
from policies.strategies.scorers import SCORERS
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, remember, result, system, talk, user, words
from tests.profile import tried

FEW = settings(
    max_examples=tried(25, 50),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
MANY = settings(FEW, max_examples=tried(50, 100))
MIN_CLIPPED = 96
MAX_NOTE_LEN = 64
GOOD_NOTES = "Goal: ship it. " + " ".join(f"Step {n} was done in src/part_{n}.py with code E{n}77." for n in range(12))

# -- conversations ---------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 12, 40, 90, 200, 500, 1_500])
NAMES = st.sampled_from(["alpha", "order #A17-9 of Ada", "src/main.py line 12", '{"id": "X-55", "price": 12.5}'])
TEXTS = st.builds(lambda size, name: f"{name} {words(size)}"[: 4 * size], SIZES, NAMES)
MARKS = st.sampled_from([None, None, None, None, True, False])
CALLS = st.sampled_from(["call_0", "call_1", "c-77"])


@st.composite
def steps(draw: st.DrawFn) -> list[Said]:
    """An assistant message with one to three parallel calls, answered in any order, by old and new conventions."""
    if draw(st.integers(0, 5)) == 0:
        call = ToolCall("function:look", "look", '{"at": 1}')
        return [assistant(draw(TEXTS), call), result(draw(TEXTS), None)]
    ids = [f"{draw(CALLS)}.{n}" for n in range(draw(st.integers(1, 3)))]
    calls = [ToolCall(i, draw(st.sampled_from(["look", "get_user"])), '{"id": "u_1"}') for i in ids]
    said = assistant(draw(TEXTS), *calls, keep=draw(MARKS))
    return [said, *(result(draw(TEXTS), i, keep=draw(MARKS)) for i in draw(st.permutations(ids)))]


@st.composite
def turns(draw: st.DrawFn) -> list[Said]:
    """One thing that happens in a conversation: mostly legal, at times what real clients do send."""
    kind = draw(st.sampled_from(["user", "user", "assistant", "step", "step", "step", "system", "orphan", "odd"]))
    if kind == "user":
        return [user(draw(TEXTS), keep=draw(MARKS), media=draw(st.sampled_from([0, 0, 0, 1])))]
    if kind == "assistant":
        return [assistant(draw(TEXTS), keep=draw(MARKS))]
    if kind == "system":
        return [system(draw(TEXTS))]
    if kind == "orphan":
        return [result(draw(TEXTS), "nobody")]
    if kind == "odd":
        return [Said(draw(st.sampled_from(["ipython", "developer", "latest_reminder"])), draw(TEXTS))]
    return draw(steps())


@st.composite
def conversations(draw: st.DrawFn, *, most: int = 14, legal: bool = False) -> list[list[Said]]:
    """What happens in a conversation, event by event; some events happen twice; the last step may be open."""
    happened = [[system(draw(TEXTS))]] if draw(st.booleans()) else []
    if legal:
        happened.append([user(draw(TEXTS))])
    for _ in range(draw(st.integers(0, most))):
        again = happened and draw(st.integers(0, 6)) == 0
        happened.append(draw(st.sampled_from(happened)) if again else draw(turns()))
    if legal:
        happened = [e for e in happened if e[0].role not in ("tool", "function")]
    if happened and len(happened[-1]) > 1 and draw(st.booleans()):
        happened[-1] = happened[-1][: draw(st.integers(1, len(happened[-1]) - 1))]
    return happened


def flat(happened: Sequence[Sequence[Said]]) -> list[Said]:
    return [said for event in happened for said in event]


@st.composite
def budgets(draw: st.DrawFn, smallest: int = 200) -> TokenBudget:
    window = draw(st.sampled_from([n for n in (200, 700, 2_000, 4_096, 8_192) if n >= smallest]))
    return divide(
        ContextSettings(),
        window=window,
        max_input=draw(st.sampled_from([None, None, window * 2 // 3])),
        requested=draw(st.sampled_from([None, 1, 100, window])),
        ratio=draw(st.sampled_from([1.0, 1.0, 0.8, 1.37])),
        margin=draw(st.sampled_from([0.0, 0.05])),
    )


SHARES = st.sampled_from([0.3, 0.5, 0.8, 0.95, 1.0])
PARAMS: dict[str, st.SearchStrategy[dict[str, Param]]] = {
    "evict": st.one_of(
        st.just({}),
        st.fixed_dictionaries(
            {
                "scorer": st.sampled_from([*SCORERS]),
                "types": st.sampled_from([("tool_result",), ("user", "tool_result")]),
            }
        ),
    ),
    "compact": st.sampled_from([{}, {"keep_messages": 3}, {"keep_turns": 1}, {"evict_pct": 70}]),
    "window": st.sampled_from([{"messages": 4}, {"turns": 2}]),
    "drop_oldest": st.sampled_from([{}, {"fraction": 0.5}]),
    "prune": st.sampled_from([{"protect": 300, "minimum": 100}, {"protect": 0, "minimum": 0, "straddle": "clear"}]),
    "custom": st.just({"path": "nowhere:nothing"}),
}


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    strategy = draw(st.sampled_from(sorted({*STRATEGIES, "distil"})))
    at = draw(st.one_of(st.none(), SHARES))
    scope = draw(st.sampled_from(["total", "total", "tool_outputs", "history"]))
    return Layer(
        strategy=strategy,
        at=at if scope == "total" or at is not None else 0.8,
        stop_at=draw(st.sampled_from([None, 0.3])),
        scope=scope,
        min_savings=draw(st.sampled_from([None, 0])),
        must_reach=draw(st.sampled_from([None, None, 0.5])),
        params=draw(PARAMS.get(strategy, st.just({}))),
    )


@st.composite
def random_policies(draw: st.DrawFn) -> ContextSettings:
    """Any policy that somebody might write, sensible or not."""
    cap = st.sampled_from([None, 0.1, 0.3, 500])
    action: st.SearchStrategy[OnOverflow] = st.sampled_from(["track", "warn", "summarize", "truncate", "prune-unused"])
    caps = {name: Bucket(cap=draw(cap), on_overflow=draw(action)) for name in ("tools", "history", "tool_outputs")}
    return ContextSettings(
        summarizer=draw(SUMMARIZER),
        layers=tuple(draw(st.lists(layers(), max_size=4))),
        buckets={**caps, "summary": Bucket(charge_to="history")},
        enforce=draw(st.sampled_from(["global", "bucket"])),
        base=draw(st.sampled_from(["usable", "window", "max_input"])),
        placeholder=draw(st.sampled_from(["finding", "marker", "none"])),
        ingest=Ingest(from_start=draw(st.booleans()), cap=draw(st.sampled_from([100, 25_000]))),
        preempt=draw(st.booleans()),
    )


SUMMARIZER = st.sampled_from([None, None, "small"])
POLICIES = st.one_of(SUMMARIZER.map(lambda model: ContextSettings(summarizer=model)), random_policies())
REPLIES: st.SearchStrategy[Reply] = st.sampled_from([Summary(GOOD_NOTES), Failed("timeout"), Summary("")])


@dataclass
class Shell:
    """The least that a shell does: runs the flow, keeps the ledger, knows how much of a chain it has seen."""

    budget: TokenBudget
    settings: ContextSettings
    answer: Reply
    known: ConversationState
    ends: set[bytes]

    def decide(self, transcript: Transcript, *, ceiling: int | None = None) -> Decision:
        seen = [j + 1 for j, link in enumerate(transcript.chain) if link in self.ends]
        known = replace(self.known, length=max(seen, default=0))
        decision = run(self.flow(transcript, known, ceiling), self.answer)
        self.known = remember(known, decision, transcript)
        self.ends.update(transcript.chain[-1:])
        return decision

    def flow(self, transcript: Transcript, known: ConversationState, ceiling: int | None = None) -> Flow[Decision]:
        return plan(
            transcript, settings=self.settings, budget=self.budget, known=known, counter=CHARS4, ceiling=ceiling
        )


def shell(budget: TokenBudget, policy: ContextSettings | None = None, answer: Reply | None = None) -> Shell:
    return Shell(budget, policy or ContextSettings(), answer or Failed("none"), ConversationState(), set())


def run(flow: Flow[Decision], answer: Reply) -> Decision:
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        reply = Done() if isinstance(asked, Offload) else answer


def attempt(flow: Flow[Decision], answer: Reply | None = None) -> Decision | BudgetUnreachable:
    try:
        return run(flow, answer or Failed("none"))
    except BudgetUnreachable as error:
        return error


def pieces_of(decision: Decision, transcript: Transcript) -> tuple[PlannedMessage, ...]:
    if decision.pieces is not None:
        return decision.pieces
    return tuple(PlannedMessage(i, m.tokens) for i, m in enumerate(transcript.messages))


def sent(decision: Decision, transcript: Transcript) -> list[tuple[bytes, str | None]]:
    """The array that goes up after the head, each message by its digest and what replaces it."""
    return [
        (b"" if p.index is None else transcript.messages[p.index].digest, p.text)
        for p in pieces_of(decision, transcript)
        if p.index is None or p.index >= transcript.head
    ]


def complaints(messages: Sequence[Message | None]) -> Iterator[str]:
    """What a strict upstream says about an array; None stands for a summary, which is a user message."""
    if not messages:
        yield "no messages"
    open_calls: list[str] = []
    for n, message in enumerate(messages):
        if message is not None and message.is_result:
            name = next((c for c in open_calls if message.answers in (None, c)), None)
            if name is None:
                yield f"message {n} answers no call"
            else:
                open_calls.remove(name)
            continue
        if open_calls:
            yield f"message {n} comes before the results of {open_calls}"
        open_calls = list(message.call_ids) if message is not None else []
    if open_calls:
        yield f"the calls {open_calls} have no results"
    spoken = [m for m in messages if m is None or not m.is_head]
    if spoken and spoken[0] is not None and spoken[0].role != "user":
        yield "the first message is not a user's"


def blocks(transcript: Transcript) -> list[list[int]]:
    """Indices of what belongs together: calls with the results that follow, anything else alone."""
    messages = transcript.messages
    found: list[list[int]] = []
    for i in range(transcript.head, len(messages)):
        first = messages[found[-1][0]] if found else None
        if messages[i].is_result and first is not None and (first.call_ids or first.is_result):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def must_stay(transcript: Transcript) -> tuple[set[int], set[int]]:
    """Indices of what stays word for word, and of what the model has not read yet."""
    messages, together = transcript.messages, blocks(transcript)
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    verbatim = {i for i, m in enumerate(messages) if m.role in ("system", "developer")} | set(users[:1] + users[-1:])
    for block in together:
        if any(messages[i].keep for i in block):
            verbatim.update(block)
    spoken = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
    tools = [b for b in together if b[-1] >= spoken and (messages[b[0]].call_ids or messages[b[0]].is_result)]
    return verbatim, {i for block in (*together[-1:], *tools[-1:]) for i in block}


def smallest_possible(transcript: Transcript, limit: int) -> int:
    """Tokens that nothing may take away: protected messages, the clippable ones as small as clipping makes them.

    What a user says is cut only where the one message is larger than the limit.
    """
    messages = transcript.messages
    verbatim, unread = must_stay(transcript)
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    pinned = {i for block in blocks(transcript) if any(messages[j].keep for j in block) for i in block}
    spoken = {i for i in unread if i in users} | set(users[-1:]) | (set(users[:1]) - pinned)
    clippable = {i for i in unread if messages[i].is_result} | {i for i in spoken if messages[i].tokens > limit}
    total = transcript.tools + transcript.priming + MAX_NOTE_LEN
    for i in verbatim | unread:
        small = i in clippable and not messages[i].media
        total += min(messages[i].tokens, MIN_CLIPPED) if small else messages[i].tokens
    return total


# -- one request -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P12", "A2.12", "D3", "A0.51")
@MANY
@given(conversations(), budgets(), POLICIES, REPLIES)
def test_what_is_forwarded_fits_or_the_error_says_why_not(
    happened: list[list[Said]], budget: TokenBudget, policy: ContextSettings, answer: Reply
) -> None:
    transcript = talk(flat(happened), tools=20)
    decision = attempt(shell(budget, policy).flow(transcript, ConversationState()), answer)
    limit = budget.send_limit if policy.manages else budget.reserved_limit
    if isinstance(decision, BudgetUnreachable):
        assert set(decision.buckets) == set(BUCKETS)
        assert sum(decision.buckets.values()) > budget.estimate(limit)
        assert 0 < decision.protected <= sum(decision.buckets.values())
        assert (decision.window, decision.reserve) == (budget.window, budget.reserve)
        assert smallest_possible(transcript, limit) > limit, "clipping would have made it fit"
        return
    pieces = pieces_of(decision, transcript)
    assert decision.raw_after == sum(p.tokens for p in pieces) + transcript.tools + transcript.priming
    assert decision.raw_after <= min(limit, transcript.tokens)
    assert decision.after == budget.estimate(decision.raw_after)
    if decision.pieces is not None:
        assert sum(decision.buckets.values()) == decision.after
    for piece in pieces:
        if piece.text is not None:
            beside = 4  # of what stands in shorter words, calls and thinking stay
            if piece.index is not None and piece.kind in CONDENSED:
                said = CHARS4.count(transcript.read(piece.index).text)
                beside = max(beside, transcript.messages[piece.index].tokens - said)
            assert piece.tokens == beside + CHARS4.count(piece.text), "tokens are what a recount gives"


@pytest.mark.requirement("P3", "A0.52", "A2.9", "D9")
@MANY
@given(conversations(legal=True), budgets(), POLICIES, REPLIES)
def test_what_was_valid_stays_valid(
    happened: list[list[Said]], budget: TokenBudget, policy: ContextSettings, answer: Reply
) -> None:
    transcript = talk(flat(happened))
    before = list(complaints(transcript.messages))
    try:
        decision = shell(budget, policy, answer).decide(transcript)
    except BudgetUnreachable:
        return
    pieces = pieces_of(decision, transcript)
    after = list(complaints([None if p.index is None else transcript.messages[p.index] for p in pieces]))
    assert len(after) <= len(before), after
    assert all(p.text is None or p.text.strip() for p in pieces), "nothing is replaced by nothing"
    indices = [p.index for p in pieces if p.index is not None]
    assert indices == sorted(set(indices)), "what stays, stays in order"


@pytest.mark.requirement("A0.38", "A0.50", "A2.7", "D9")
@MANY
@given(conversations(), budgets(), POLICIES)
def test_protected_content_survives_word_for_word(
    happened: list[list[Said]], budget: TokenBudget, policy: ContextSettings
) -> None:
    transcript = talk(flat(happened))
    verbatim, unread = must_stay(transcript)
    decision = attempt(shell(budget, policy).flow(transcript, ConversationState()))
    if isinstance(decision, BudgetUnreachable):
        return
    pieces = {p.index: p for p in pieces_of(decision, transcript)}
    assert verbatim | unread <= set(pieces)
    clipped = {i for i, p in pieces.items() if p.kind is EditKind.CLIP}
    assert all(transcript.messages[i or 0].role not in ("system", "developer", "assistant") for i in clipped)
    for i in verbatim - clipped:
        assert pieces[i].text is None
    for i in unread - clipped:
        assert pieces[i].kind in (None, EditKind.INGEST_CAP)


@pytest.mark.requirement("A0.55", "D25", "P2")
@FEW
@given(conversations(), budgets(), POLICIES, REPLIES)
def test_planning_twice_is_a_no_op_and_the_same_input_gives_the_same_output(
    happened: list[list[Said]], budget: TokenBudget, policy: ContextSettings, answer: Reply
) -> None:
    transcript = talk(flat(happened))
    proxy = shell(budget, policy, answer)
    try:
        first = proxy.decide(transcript)
    except BudgetUnreachable:
        return
    assert shell(budget, policy, answer).decide(talk(flat(happened))) == first
    known = proxy.known
    second = proxy.decide(transcript)
    assert second.action is (Action.PASS if first.action is Action.PASS else Action.REPLAY)
    assert second.pieces == first.pieces
    assert not second.is_new
    assert (known.edits, known.cuts) == (proxy.known.edits, proxy.known.cuts)


@pytest.mark.requirement("A0.55")
@FEW
@given(conversations(), budgets())
def test_nothing_that_came_in_is_changed(happened: list[list[Said]], budget: TokenBudget) -> None:
    transcript, untouched = talk(flat(happened)), talk(flat(happened))
    proxy = shell(budget)
    known = ConversationState()
    attempt(proxy.flow(transcript, known))
    assert known == ConversationState()
    assert transcript.messages == untouched.messages
    assert [transcript.read(i) for i in range(len(transcript.messages))] == [
        untouched.read(i) for i in range(len(untouched.messages))
    ]


@pytest.mark.requirement("P6")
@FEW
@given(conversations(legal=True), budgets())
def test_a_trimmed_request_fits_and_is_never_larger(happened: list[list[Said]], budget: TokenBudget) -> None:
    transcript = talk(flat(happened))
    try:
        decision = trim(transcript, settings=ContextSettings(), budget=budget, counter=CHARS4)
    except BudgetUnreachable:
        assert smallest_possible(transcript, budget.send_limit) > budget.send_limit
        return
    assert decision.raw_after <= min(transcript.tokens, budget.send_limit)
    after = [None if p.index is None else transcript.messages[p.index] for p in pieces_of(decision, transcript)]
    assert len(list(complaints(after))) <= len(list(complaints(transcript.messages)))


@pytest.mark.requirement("A2.13", "A2.25")
@FEW
@given(conversations(), budgets(smallest=700), st.sampled_from([0.8, 0.5]))
def test_a_refused_request_becomes_smaller_or_cannot(
    happened: list[list[Said]], budget: TokenBudget, share: float
) -> None:
    transcript = talk(flat(happened))
    proxy = shell(budget)
    try:
        first = proxy.decide(transcript)
    except BudgetUnreachable:
        return
    ceiling = int(first.raw_after * share)
    try:
        harder = proxy.decide(transcript, ceiling=ceiling)
    except BudgetUnreachable:
        assert smallest_possible(transcript, ceiling) > ceiling
        return
    assert harder.raw_after <= ceiling


# -- a conversation --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D25", "P2", "A0.96")
@FEW
@given(conversations(most=20), budgets(smallest=4_096), POLICIES, REPLIES)
def test_between_two_batches_each_array_begins_with_the_one_before(
    happened: list[list[Said]], budget: TokenBudget, policy: ContextSettings, answer: Reply
) -> None:
    head = next((n for n, e in enumerate(happened) if e[0].role not in ("system", "developer")), len(happened))
    proxy = shell(budget, policy, answer)
    before: list[tuple[bytes, str | None]] | None = None
    for stop in range(head + 1, len(happened) + 1):
        transcript, seen = talk(flat(happened[:stop])), proxy.known
        try:
            decision = proxy.decide(transcript)
        except BudgetUnreachable:
            before = None
            continue
        now = sent(decision, transcript)
        if before is not None and not decision.trail:
            assert now[: len(before)] == before
        if decision.trail:
            known = replay(transcript, seen, protect(transcript))
            assert decision.raw_after <= known.tokens, "a batch never leaves more than there was"
        before = now


@pytest.mark.requirement("P1", "A0.38", "P3")
@FEW
@given(
    conversations(most=16, legal=True), conversations(most=6, legal=True), st.data(), budgets(smallest=700), POLICIES
)
def test_rewinds_and_rewritten_histories_get_no_cut_whose_prefix_is_gone(
    happened: list[list[Said]],
    other: list[list[Said]],
    data: st.DataObject,
    budget: TokenBudget,
    policy: ContextSettings,
) -> None:
    proxy = shell(budget, policy)
    for _ in range(5):
        edited = list(happened)
        what = data.draw(st.sampled_from(["grow", "rewind", "rewrite", "drop", "mark", "splice"]))
        if edited and what != "grow":
            at = data.draw(st.integers(0, len(edited) - 1))
            if what == "rewind":
                edited = edited[: at + 1]
            elif what == "rewrite":
                edited[at] = [user("changed my mind")]
            elif what == "drop":
                del edited[at]
            elif what == "mark":
                edited[at] = [replace(said, keep=data.draw(st.sampled_from([True, False]))) for said in edited[at]]
            else:
                edited = [*edited[:at], *other]
        transcript = talk(flat(edited))
        verbatim, unread = must_stay(transcript)
        known = proxy.known.cuts
        try:
            decision = proxy.decide(transcript)
        except BudgetUnreachable:
            continue
        for piece in pieces_of(decision, transcript):
            made = [*known, *([decision.cut] if decision is not None and decision.cut is not None else [])]
            alike = [cut for cut in made if piece.index is None and cut.text == piece.text]
            assert not alike or any(transcript.begins_with(cut.covers, cut.prefix) for cut in alike)
        pieces = {p.index: p for p in pieces_of(decision, transcript)}
        assert verbatim | unread <= set(pieces)
        for i in verbatim:
            assert pieces[i].kind in (None, EditKind.CLIP)
        for i in unread:
            assert pieces[i].kind in (None, EditKind.CLIP, EditKind.INGEST_CAP)
        after = [None if p.index is None else transcript.messages[p.index] for p in pieces_of(decision, transcript)]
        assert len(list(complaints(after))) <= len(list(complaints(transcript.messages)))
        assert decision.raw_after <= transcript.tokens


@pytest.mark.requirement("D25", "A0.96")
@FEW
@given(conversations(), budgets())
def test_every_token_is_in_exactly_one_bucket(happened: list[list[Said]], budget: TokenBudget) -> None:
    transcript = talk(flat(happened), tools=33)
    assume(transcript.messages)
    proxy = shell(budget)
    try:
        proxy.decide(transcript)
    except BudgetUnreachable:
        return
    draft = replay(transcript, proxy.known, protect(transcript))
    assert tuple(draft.buckets()) == BUCKETS
    assert sum(draft.buckets().values()) == draft.tokens
    assert all(tokens >= 0 for tokens in draft.buckets().values())
