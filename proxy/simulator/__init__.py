"""A strict OpenAI-compatible upstream with a real window, for the demo, the tests and people who try policies."""

from proxy.simulator.app import Simulator, create_simulator
from proxy.simulator.ledger import Seen
from proxy.simulator.serving import RunningSimulator, run_simulator, serve_simulator
from proxy.simulator.settings import Answer, Call, Dialect, SimulatorSettings, SummaryMode

__all__ = [
    "Answer",
    "Call",
    "Dialect",
    "RunningSimulator",
    "Seen",
    "Simulator",
    "SimulatorSettings",
    "SummaryMode",
    "create_simulator",
    "run_simulator",
    "serve_simulator",
]
