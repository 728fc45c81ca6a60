"""Summaries in words: asking a model for them, judging what it says, and binding it to who said what."""

from policies.summaries.condense import Written, condense
from policies.summaries.grounding import Coverage, grounded, invented, missing, normal_text
from policies.summaries.judge import declines, judge, without_reasoning
from policies.summaries.prompts import PROMPTS, Prompt
from policies.summaries.proposal import Proposal, read_proposal
from policies.summaries.provenance import Bound, bind
from policies.summaries.transcript import Line, enclosed, render_transcript
from policies.summary import harmless

__all__ = [
    "PROMPTS",
    "Bound",
    "Coverage",
    "Line",
    "Prompt",
    "Proposal",
    "Written",
    "bind",
    "condense",
    "declines",
    "enclosed",
    "grounded",
    "harmless",
    "invented",
    "judge",
    "missing",
    "normal_text",
    "read_proposal",
    "render_transcript",
    "without_reasoning",
]
