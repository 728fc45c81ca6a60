"""A strict OpenAI-compatible upstream with a real window, for the demo, the tests and people who try policies."""

from proxy.simulator.answers import SimulatedAnswer, SimulatedCall
from proxy.simulator.errors import Dialect, Problem, Rejected
from proxy.simulator.recorder import RecordedRequest
from proxy.simulator.serving import RunningSimulator, run_simulator, serve_simulator, serve_until_stopped
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.window import Request

__all__ = [
    "Dialect",
    "Problem",
    "RecordedRequest",
    "Rejected",
    "Request",
    "RunningSimulator",
    "SimulatedAnswer",
    "SimulatedCall",
    "SimulatorSettings",
    "run_simulator",
    "serve_simulator",
    "serve_until_stopped",
]
