"""How a document's commands are run: forked from a process that is ready, and in the long proofs as programs of their own."""

import os
import sys
from pathlib import Path

import pytest

from tests.servers.ready_python import ready_python


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.prove)])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What makes a document's `trellis` and `python` the one or the other."""
    if request.param == "started":
        return {}
    places = [str(Path(ready_python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    # A plugin that the suite leaves out, too (pyproject.toml); to import it takes longer than the tests of a guide.
    return {"PATH": os.pathsep.join(places), "PYTEST_ADDOPTS": "-p no:schemathesis"}
