"""`trellis completion`: a script for the shell that completes commands and options with the Tab key."""

from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as shells

from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.program import COMPLETING, PROGRAM


class Shell(StrEnum):
    """The shells that a script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "completion", section="Reference", json=False)(completion)


def completion(cli: Cli, shell: Annotated[Shell, typer.Argument(help="Your shell.")]) -> None:
    """Print the script that makes your shell complete `trellis` commands.

    bash: add `eval "$(trellis completion bash)"` to ~/.bashrc; zsh: the same with zsh to ~/.zshrc, after compinit;
    fish: `trellis completion fish > ~/.config/fish/completions/trellis.fish`.
    """
    # The library exports both names for its own `--show-completion` alone; there is no other way to a program's own command.
    made = shells.get_completion_script(  # pyright: ignore[reportPrivateImportUsage]
        prog_name=PROGRAM, complete_var=COMPLETING, shell=shell.value
    )
    cli.out.line(made)


def prepare() -> None:
    """Let the program answer the scripts; called when a shell asks."""
    shells.completion_init()  # pyright: ignore[reportPrivateImportUsage]
