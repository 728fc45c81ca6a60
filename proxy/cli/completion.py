"""``weir completion``: what a shell evaluates to complete commands and options."""

import click
from click.shell_completion import get_completion_class

from proxy.cli import main


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell; evaluate it where the shell starts.

    \b
    Example:
      echo 'eval "$(weir completion bash)"' >> ~/.bashrc
      echo 'eval "$(weir completion zsh)"' >> ~/.zshrc
      weir completion fish > ~/.config/fish/completions/weir.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows the three
    made = kind(main, {}, "weir", "_WEIR_COMPLETE")
    click.echo(made.source_template % made.source_vars())
