"""`python -m trellis`."""

import sys

from trellis.cli import main

sys.exit(main())
