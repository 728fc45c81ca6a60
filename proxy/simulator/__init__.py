"""A strict OpenAI-compatible upstream with a real window, for the demo, the tests and people who try policies."""

from proxy.simulator.app import RunningSimulator, run_simulator, serve_simulator, serve_until_stopped
from proxy.simulator.delivery import SimulatedAnswer, SimulatedCall
from proxy.simulator.model import RecordedRequest, SimulatorSettings
from proxy.simulator.window import Dialect, Problem, Request

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
