"""`rlhf completion`: the script that completes commands and flags in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ..output import echo


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, flags and file names of `rlhf`.

    \b
    Examples:
      rlhf completion bash >> ~/.bashrc
      rlhf completion zsh >> ~/.zshrc
      rlhf completion fish > ~/.config/fish/completions/rlhf.fish
    """
    from ..main import cli

    found = get_completion_class(shell)
    assert found is not None
    echo(found(cli, {}, "rlhf", "_RLHF_COMPLETE").source(), newline=False)
