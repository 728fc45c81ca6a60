"""Fidelity judged by a real small model: what a weak judge says in prose is still read strictly, or not at all."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from policies.effects import Answers, Effect, Reply, Summarize, Summary, Together, step
from policies.quality.coverage import Dimension, questions_for
from policies.quality.fidelity import ANSWER, JUDGE, AnswerVerdict, Judged, evaluate
from proxy.cli import main
from proxy.cli.evaluate import Evaluated, Models, compactions
from proxy.config.loading import load_config
from proxy.config.presets import preset_policies
from proxy.config.values import Flags
from proxy.effects.perform import drive
from proxy.features.replay.scenarios import Conditions, Managed, store_in_memory
from proxy.features.replay.script import Script, read_recordings
from tests.functional.harness import COUNTER
from tests.real.environments import Unavailable
from tests.real.llama import Llama
from tests.real.summariser import summariser_server
from tests.real.test_checkpoints import report

pytestmark = [pytest.mark.real, pytest.mark.timeout(1_800)]

RECORDED = Path(__file__).parent / "data" / "airline.jsonl"
WINDOW = 6_400
READS = 6_144
"""Tokens that the judge reads at once: less than the longest of the conversations, which is read in parts."""
SHARE = 0.5
"""Of its window that a question may take; its tokenizer splits the run's ids finer than the one that counts here."""
QUESTIONS = 4
BATCHES = 1
FOUR_KINDS = ("goal", "step", "decisions", "blocks")
WORDS = {
    "yes": AnswerVerdict.YES,
    "no": AnswerVerdict.NO,
    "not yes": AnswerVerdict.NO,
    "unknown": AnswerVerdict.UNKNOWN,
}


@dataclass(slots=True, kw_only=True)
class Heard(Models):
    """A model that is asked, and every question with its reply."""

    all: list[tuple[Summarize, Reply, float]] = field(default_factory=list)

    async def __call__(self, effect: Effect) -> Reply:
        begun = time.monotonic()
        reply = await Models.__call__(self, effect)
        asked: tuple[Effect, ...] = effect.effects if isinstance(effect, Together) else (effect,)
        told: tuple[Reply, ...] = reply.replies if isinstance(reply, Answers) else (reply,)
        for one, answer in zip(asked, told, strict=True):
            assert isinstance(one, Summarize)
            self.all.append((one, answer, time.monotonic() - begun))
        return reply

    def of(self, purpose: str) -> list[tuple[Summarize, Reply, float]]:
        """The questions of one purpose."""
        return [each for each in self.all if each[0].purpose == purpose]


@dataclass(frozen=True, slots=True)
class Judging:
    """What the model made of every batch of a recorded conversation."""

    done: tuple[Evaluated, ...]
    heard: Heard
    seconds: float
    model: str
    base_url: str

    @property
    def judged(self) -> list[Judged]:
        """Every question with its verdict."""
        return [judged for each in self.done for judged in each.fidelity.judged]


async def judge(llama: Llama, model: str) -> Judging:
    """All batches of the recorded conversation, the model asking nothing but the questions of the evaluation."""
    begun = time.monotonic()
    config = load_config(None, env={}, flags=Flags(upstream=llama.base_url))
    settings = preset_policies()["balanced"]
    conditions = Conditions(counter=COUNTER, window=WINDOW, max_tokens=256)
    (place,) = read_recordings(RECORDED)
    script = Script(place.recording, counter=COUNTER, model="")
    done = []
    heard = Heard(config=config, default=model)
    async with aclosing(heard), store_in_memory() as store:
        scenario = Managed(settings, conditions, store)
        async for length, contexts, coverage in compactions(script, scenario, tools=settings.notes):
            flow = evaluate(
                contexts.original,
                contexts.compacted,
                questions=questions_for(contexts, count=QUESTIONS, tools=settings.notes),
                counter=COUNTER,
                max_input=int(SHARE * READS),
            )
            fidelity = await drive(flow, step(flow), heard)
            done.append(Evaluated("one", length, contexts.tokens_before, contexts.tokens_after, coverage, fidelity))
            if len(done) == BATCHES:
                break
    return Judging(tuple(done), heard, time.monotonic() - begun, model, llama.base_url)


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judging]:
    try:
        with summariser_server(tmp_path_factory.mktemp("judge"), window=READS) as (llama, model):
            yield asyncio.run(judge(llama, model))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.requirement("A0.125", "A0.71", "A0.56")
def test_every_batch_has_its_questions_with_the_four_kinds_and_a_coverage_beside_them(
    judging: Judging, record_property: Any
) -> None:
    assert judging.done
    for each in judging.done:
        texts = [judged.question.text for judged in each.fidelity.judged]
        assert len(texts) == QUESTIONS
        assert all(kind in text for kind, text in zip(FOUR_KINDS, texts[:4], strict=True))
        assert each.coverage.whole.value is not None
        figures = {d.value: each.fidelity.score(d) for d in Dimension}
        report(
            record_property,
            f"request {each.request}",
            f"{each.before} -> {each.after} tokens, coverage {each.coverage.whole.value:.3f}, "
            f"fidelity {each.fidelity.score()}, {figures}, undecided {each.fidelity.unknown}",
        )
    spent = judging.heard.spent
    report(
        record_property,
        "in all",
        f"{judging.model}: {spent.calls} calls, {spent.asked} tokens read, {spent.answered} written, "
        f"{judging.seconds:.0f} s",
    )


@pytest.mark.requirement("A0.131")
def test_the_contexts_are_read_in_parts_that_fit_and_none_is_cut(judging: Judging) -> None:
    asked = judging.heard.of(ANSWER.purpose)
    groups = -(-QUESTIONS // 5)
    assert len(asked) > 2 * groups * len(judging.done)  # some context took several parts
    assert judging.heard.of(JUDGE.purpose)
    assert not [reply for _, reply, _ in judging.heard.all if getattr(reply, "reason", "") == "context_length_exceeded"]
    read = "\n".join(effect.prompt for effect, _, _ in asked)
    (place,) = read_recordings(RECORDED)
    for each in judging.done:
        said = [str(value["content"]).split() for value in place.recording.values[1 : each.request]]
        assert [words[-1] for words in said if words and words[-1] not in read] == []


@pytest.mark.requirement("A0.131", "A0.122")
def test_a_verdict_is_what_the_judge_said_in_one_word_and_prose_is_none(judging: Judging, record_property: Any) -> None:
    """Read here in another way: all of the reply, less marks around it, is one of the words, or begins with one."""
    said = Counter[str]()
    replies = [reply for _, reply, _ in judging.heard.of(JUDGE.purpose)]
    for reply in replies:
        said[reply.text.strip()[:40] if isinstance(reply, Summary) else str(reply)] += 1
    report(record_property, "what the judge said", str(said.most_common(12)))
    judged = [each for each in judging.judged if each.why in {"", "undecided", "unreadable"}]
    assert len(judged) <= len(replies)
    expected = Counter(map(read, replies))
    got = Counter(each.verdict for each in judged)
    assert got[AnswerVerdict.YES] == expected[AnswerVerdict.YES]
    assert got[AnswerVerdict.NO] == expected[AnswerVerdict.NO]


def read(reply: Reply) -> AnswerVerdict:
    """The verdict of a reply, read in the simplest way there is."""
    if not isinstance(reply, Summary):
        return AnswerVerdict.UNKNOWN
    text = reply.text.strip().strip("`").strip().lower()
    text = text.strip(" .!*\"'\n")
    first = text.split()[0].strip(".,:;*\"'") if text.split() else ""
    return WORDS.get(text) or WORDS.get(first, AnswerVerdict.UNKNOWN)


@pytest.mark.requirement("A0.122", "A0.131", "A0.125")
def test_the_score_is_consistent_over_judged_and_null_where_nothing_was(judging: Judging) -> None:
    for each in judging.done:
        verdicts = Counter(judged.verdict for judged in each.fidelity.judged)
        decided = verdicts[AnswerVerdict.YES] + verdicts[AnswerVerdict.NO]
        expected = verdicts[AnswerVerdict.YES] / decided if decided else None
        assert each.fidelity.score() == expected
        assert all(judged.why for judged in each.fidelity.judged if judged.verdict is AnswerVerdict.UNKNOWN)
        for judged in each.fidelity.judged:
            missing = [v for v in judged.question.expected if v in judged.original and v not in judged.compacted]
            assert not missing or judged.verdict is not AnswerVerdict.YES  # whatever the judge thinks of it


@pytest.mark.requirement("A0.125")
def test_the_command_passes_no_gate_that_the_model_did_not_judge(judging: Judging, tmp_path: Path) -> None:
    """A budget that no answer fits into: the score is null, and null is below any gate."""
    options = ["--window", WINDOW, "--upstream", judging.base_url, "--model", judging.model, "--model-window", READS]
    gates = ["--gate", 0.1, "--budget", 1, "--json", "--limit", 1, "--count", 4]
    command = ["evaluate", str(RECORDED), *options, *gates]
    ran = CliRunner().invoke(main, [str(word) for word in command], env={"WEIR_CONFIG": None})
    assert ran.exit_code == 1, ran.output
    found = json.loads(ran.stdout)
    assert (found["total"]["score"], found["passed"]) == (None, False)
    assert set(found["total"]["unknown_because"]) == {"budget"}
    assert found["total"]["coverage"] is not None
