"""Whether what is left after a compaction still tells what the whole conversation told.

Two measures stand side by side. Coverage needs no model: which facts, identifiers and rules stand in what is left,
and which can be fetched back. Fidelity asks a model the same questions of both and has each pair of answers judged.
"""

from policies.fidelity.asking import Terms, evaluate
from policies.fidelity.contexts import Contexts, contexts_of
from policies.fidelity.coverage import Coverage, Share, coverage_of
from policies.fidelity.prompts import ANSWER, JUDGE, PROMPTS, PROPOSE
from policies.fidelity.questions import FEWEST, MOST, Dimension, Question, questions_for
from policies.fidelity.verdicts import Fidelity, Judged, Verdict, read_verdict

__all__ = [
    "ANSWER",
    "FEWEST",
    "JUDGE",
    "MOST",
    "PROMPTS",
    "PROPOSE",
    "Contexts",
    "Coverage",
    "Dimension",
    "Fidelity",
    "Judged",
    "Question",
    "Share",
    "Terms",
    "Verdict",
    "contexts_of",
    "coverage_of",
    "evaluate",
    "questions_for",
    "read_verdict",
]
