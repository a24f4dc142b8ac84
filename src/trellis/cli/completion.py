"""`trellis completion`: prints a shell script that completes commands and options."""

from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as shells

from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.places import PROGRAM
from trellis.cli.program import COMPLETING


class Shell(StrEnum):
    """The shells that a script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def add_to(program: typer.Typer) -> None:
    command(program, "completion", section="Reference", json=False)(completion)


def completion(cli: Cli, shell: Annotated[Shell, typer.Argument(help="Your shell.")]) -> None:
    """Print the script that makes your shell complete `trellis` commands.

    bash: add `eval "$(trellis completion bash)"` to ~/.bashrc; zsh: the same with zsh to ~/.zshrc, after compinit;
    fish: `trellis completion fish > ~/.config/fish/completions/trellis.fish`.
    """
    # The library uses both names only for its own `--show-completion`; a custom command has no other access.
    script = shells.get_completion_script(  # pyright: ignore[reportPrivateImportUsage]
        prog_name=PROGRAM, complete_var=COMPLETING, shell=shell.value
    )
    cli.out.line(script)
