"""A strict OpenAI-compatible upstream with a real window, for the tests and the benchmarks."""

from tests.upstream.app import RunningSimulator, run_simulator, serve_simulator
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
]
