"""``weir simulate``: the simulated model alone."""

import json

import click

from proxy.cli.shared import listening
from proxy.simulator import RunningSimulator, SimulatorSettings, serve_until_stopped
from proxy.wire.counting import Tokenizer


@click.command()
@click.option("--window", type=click.IntRange(min=16), default=8192, help="Context window, tokens.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, help="0 takes a free port.")
@click.option(
    "--model", "models", multiple=True, help="A model that /v1/models lists; may be repeated."
)
@click.option(
    "--latency", type=click.FloatRange(min=0), default=0.0, help="Seconds until an answer begins."
)
def simulate(*, window: int, host: str, port: int, models: tuple[str, ...], latency: float) -> None:
    """Start a simulated model, to try Weir without a key: it has a window, and what it says means
    nothing.

    It serves /v1/chat/completions, /v1/responses and /v1/messages. The models fault:429, fault:500
    and fault:cut are a rate limit, a server error and a stream that breaks off.

    \b
    Example:
      weir simulate --window 8192 --port 9000
      weir serve --upstream http://127.0.0.1:9000/v1
    """
    settings = SimulatorSettings(window=window, models=models or ("sim",), latency=latency)
    counter = Tokenizer().counter("o200k_base")
    with listening(host, port) as listener:
        serve_until_stopped(settings, counter=counter, listener=listener, ready=_announce)


def _announce(running: RunningSimulator) -> None:
    settings = running.simulator.settings
    body = {"model": settings.models[0], "messages": [{"role": "user", "content": "Hello"}]}
    click.echo(f"{running.base_url}  (window {settings.window} tokens; Ctrl-C stops)")
    click.echo(
        f"curl {running.base_url}/chat/completions -H 'content-type: application/json' -d"
        f" '{json.dumps(body)}'"
    )
