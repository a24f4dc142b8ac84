"""The command line: `trellis`. One module per noun; `program` joins them, `problems` says what went wrong."""

from trellis.cli.program import main

__all__ = ["main"]
