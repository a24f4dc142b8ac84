"""`python -m bench`."""

import signal
import sys

from bench.cli import main

# Who ends the run ends its servers and workers with it, and sees what was measured so far.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
sys.exit(main(sys.argv[1:]))
