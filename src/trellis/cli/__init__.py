"""The command line `trellis`: one module per noun. `program` combines them, `problems` explains errors."""

from trellis.cli.program import main

__all__ = ["main"]
