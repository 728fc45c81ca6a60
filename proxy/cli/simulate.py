"""``weir simulate``: the simulator alone."""

import json
from typing import Any

import click

from proxy.cli.shared import listening
from proxy.simulator import Dialect, RunningSimulator, SimulatorSettings, serve_until_stopped
from proxy.wire.counting import Tokenizer


@click.command()
@click.option("--window", type=click.IntRange(min=16), default=8192, help="Context window, tokens.")
@click.option(
    "--dialect",
    type=click.Choice([*map(str, Dialect)]),
    default=Dialect.OPENAI.value,
    help="Whose errors and endpoints to imitate.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, help="0 takes a free port.")
@click.option("--max-output", type=click.IntRange(min=1), help="Most tokens an answer may ask for.")
@click.option("--model", "models", multiple=True, help="A model that /v1/models lists; may be repeated.")
@click.option("--steps", type=click.IntRange(min=0), help="Call the request's tools in so many steps first.")
@click.option("--bound", is_flag=True, help="Reasoning is good only behind the very history it was made behind.")
@click.option("--foreign", is_flag=True, help="Take reasoning, ids and chains of other servers as its own.")
@click.option("--stateless", is_flag=True, help="Keep no answers, items and threads.")
@click.option(
    "--overflow-in-stream",
    type=click.Choice(["error", "failed"]),
    help="Tell a streamed request inside a 200 that it is too long.",
)
@click.option("--stop-at-window", is_flag=True, help="Answer up to the window where max_tokens reaches past it.")
def simulate(dialect: str, host: str, port: int, models: tuple[str, ...], *, stateless: bool, **options: Any) -> None:
    """Start a simulated model: a real window, realistic errors, strict checks, faults on demand.

    openai serves /v1/chat/completions and /v1/responses, anthropic /v1/messages, vllm and llamacpp all three.

    A model named fault:NAME, or the header x-sim-fault, asks for misbehaviour: fault:429:5, fault:stall,
    fault:cut_stream, fault:error_in_stream and more. GET /sim/requests shows what arrived.

    \b
    Example:
      weir simulate --window 8192 --port 9000
      weir serve --upstream http://127.0.0.1:9000/v1
    """
    options["stops_at_window"] = options.pop("stop_at_window")
    given = {name: value for name, value in options.items() if value is not None}
    settings = SimulatorSettings(
        dialect=Dialect(dialect), models=models or ("sim",), stateful=False if stateless else None, **given
    )
    counter = Tokenizer().counter("o200k_base")
    with listening(host, port) as listener:
        serve_until_stopped(settings, counter=counter, host=host, listener=listener, ready=_announce_simulator)


def _announce_simulator(running: RunningSimulator) -> None:
    settings = running.simulator.settings
    body: dict[str, object] = {
        "model": settings.models[0],
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    endpoint = "messages" if settings.dialect is Dialect.ANTHROPIC else "chat/completions"
    click.echo(f"{running.base_url}  ({settings.dialect}, window {settings.window} tokens; Ctrl-C stops)")
    click.echo(f"curl {running.base_url}/{endpoint} -H 'content-type: application/json' -d '{json.dumps(body)}'")
