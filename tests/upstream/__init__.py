"""A strict OpenAI-compatible upstream with a real window, for the demo, the tests and people who try policies."""

from tests.upstream.app import RunningSimulator, run_simulator, serve_simulator, serve_until_stopped
from tests.upstream.delivery import SimulatedAnswer, SimulatedCall
from tests.upstream.model import RecordedRequest, SimulatorSettings
from tests.upstream.window import Dialect, Problem, Request

__all__ = [
    "Dialect",
    "Problem",
    "RecordedRequest",
    "Request",
    "RunningSimulator",
    "SimulatedAnswer",
    "SimulatedCall",
    "SimulatorSettings",
    "run_simulator",
    "serve_simulator",
    "serve_until_stopped",
]
