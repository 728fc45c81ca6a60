"""``weir completion``: what a shell evaluates to complete commands and options."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from proxy.cli import main

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print the completion script of a shell; evaluate it where the shell starts.

    \b
    Example:
      echo 'eval "$(weir completion bash)"' >> ~/.bashrc
      echo 'eval "$(weir completion zsh)"' >> ~/.zshrc
      weir completion fish > ~/.config/fish/completions/weir.fish
    """
    made = SHELLS[shell](main, {}, "weir", "_WEIR_COMPLETE")
    click.echo(made.source_template % made.source_vars())
