"""Starting a simulator on a free port, beside the caller's event loop or in a thread of its own."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from anyio.from_thread import start_blocking_portal

from proxy.simulator.app import Simulator, WordCounter, create_simulator
from proxy.simulator.recorder import RecordedRequest
from proxy.simulator.settings import SimulatorSettings

START_SECONDS = 10.0
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class RunningSimulator:
    """A simulator that accepts requests at ``base_url`` (which ends in ``/v1``)."""

    simulator: Simulator
    host: str
    port: int

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """What an SDK takes as its base URL."""
        return f"{self.origin}/v1"

    @property
    def ledger(self) -> list[RecordedRequest]:
        """What arrived so far, in order."""
        return list(self.simulator.ledger)

    def forget(self) -> None:
        """Clear the ledger."""
        self.simulator.ledger.clear()

    def answered(self) -> list[RecordedRequest]:
        """The entries of requests for an answer in words."""
        return [seen for seen in self.ledger if seen.path in {"/v1/chat/completions", "/v1/messages"}]


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its host program and stops at once when told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Accept nothing more and end."""
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        """Serve until :meth:`stop`, without the tick that uvicorn polls its flags with."""
        await self.on_tick(0)
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay where they are."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


def _configure(
    settings: SimulatorSettings, counter: WordCounter, log_level: str | None = None
) -> tuple[uvicorn.Config, Simulator]:
    app = create_simulator(settings, counter=counter)
    config = uvicorn.Config(
        app, log_config=None, log_level=log_level, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    return config, app.state.simulator


def serve_until_stopped(
    settings: SimulatorSettings,
    *,
    counter: WordCounter,
    host: str,
    port: int,
    ready: Callable[[RunningSimulator], None],
) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called once the port is bound."""
    listener = _listen(host, port)
    config, simulator = _configure(settings, counter, "critical")
    ready(RunningSimulator(simulator, host, listener.getsockname()[1]))
    uvicorn.Server(config).run(sockets=[listener])


@contextlib.asynccontextmanager
async def serve_simulator(
    settings: SimulatorSettings, *, counter: WordCounter, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[RunningSimulator]:
    """A simulator in the running event loop for the length of the block; port 0 takes a free one."""
    listener = _listen(host, port)
    config, simulator = _configure(settings, counter)
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(START_SECONDS):
            while not server.started:
                if serving.done():
                    await serving
                await asyncio.sleep(0.005)
        yield RunningSimulator(simulator, host, listener.getsockname()[1])
    finally:
        simulator.ledger.release()
        server.stop()
        await serving
        listener.close()


@contextlib.contextmanager
def run_simulator(
    settings: SimulatorSettings, *, counter: WordCounter, host: str = "127.0.0.1", port: int = 0
) -> Iterator[RunningSimulator]:
    """The same in a thread of its own, for callers that block."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve_simulator(settings, counter=counter, host=host, port=port)) as running,
    ):
        yield running
