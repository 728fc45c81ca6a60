"""Whether what is left after a compaction still tells what the whole conversation told.

Two measures stand side by side. Coverage needs no model: which facts, identifiers and rules stand in what is left,
and which can be fetched back. Fidelity asks a model the same questions of both and has each pair of answers judged.
"""

from policies.fidelity.asking import ANSWER, JUDGE, PROMPTS, PROPOSE, Terms, evaluate
from policies.fidelity.coverage import Contexts, Coverage, Share, contexts_of, coverage_of
from policies.fidelity.questions import MAX_QUESTIONS, MIN_QUESTIONS, MINIMUM, Dimension, Question, questions_for
from policies.fidelity.verdicts import AnswerVerdict, Fidelity, Judged, read_verdict

__all__ = [
    "ANSWER",
    "JUDGE",
    "MAX_QUESTIONS",
    "MINIMUM",
    "MIN_QUESTIONS",
    "PROMPTS",
    "PROPOSE",
    "AnswerVerdict",
    "Contexts",
    "Coverage",
    "Dimension",
    "Fidelity",
    "Judged",
    "Question",
    "Share",
    "Terms",
    "contexts_of",
    "coverage_of",
    "evaluate",
    "questions_for",
    "read_verdict",
]
