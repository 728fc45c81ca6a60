"""Summaries in words: asking a model for them, judging what it says, and binding it to who said what."""

from policies.summary.ask import Written, condense, lines_of
from policies.summary.check import Proposal, declines, judge, read_proposal, without_reasoning
from policies.summary.material import (
    MaterialLine,
    defang,
    enclosed,
    fence,
    harmless,
    inside,
    render_resumed,
    render_summary,
    render_transcript,
)
from policies.summary.prompts import PROMPTS, Prompt
from policies.summary.provenance import bind, grounded, invented, missing, normal_text

__all__ = [
    "PROMPTS",
    "MaterialLine",
    "Prompt",
    "Proposal",
    "Written",
    "bind",
    "condense",
    "declines",
    "defang",
    "enclosed",
    "fence",
    "grounded",
    "harmless",
    "inside",
    "invented",
    "judge",
    "lines_of",
    "missing",
    "normal_text",
    "read_proposal",
    "render_resumed",
    "render_summary",
    "render_transcript",
    "without_reasoning",
]
