"""How long a command of the program takes to say what it can do, beside the interpreter alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.processes import TASK_TIMEOUT_S, ChildFailed

TRELLIS = str(Path(sys.executable).with_name("trellis"))
COMMANDS = {
    "trellis_help": [TRELLIS, "--help"],
    "jobs_help": [TRELLIS, "jobs", "--help"],
    "floor_python": [sys.executable, "-c", "pass"],
    "floor_typer": [sys.executable, "-c", "import typer"],
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""With compiled modules, as every installation has them."""


def seconds(name: str) -> float:
    """From the start of a command to its end; raises ChildFailed when it fails."""
    command, began = COMMANDS[name], time.perf_counter()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TASK_TIMEOUT_S, check=False, env=ENVIRONMENT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChildFailed(f"{' '.join(command)}: {error}") from error
    if ended.returncode:
        raise ChildFailed(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return time.perf_counter() - began
