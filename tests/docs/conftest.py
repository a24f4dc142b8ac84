"""How a document's commands are run: forked from a process that is ready, and in the long proofs as programs of their own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.forked_program import forked_program


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forked_program(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.prove)])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What makes a document's `trellis` the one or the other."""
    if request.param == "started":
        return {}
    places = [str(request.getfixturevalue("forked")), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(places)}
