"""The layers that the tests of this folder are run on. A new one adds its rig here, and nothing else."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.layers.builtin import builtin
from tests.layers.rig import Rig

LAYERS: dict[str, Callable[[Path], AbstractAsyncContextManager[Rig]]] = {"builtin": builtin}


@pytest.fixture(params=list(LAYERS))
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Rig]:
    """One layer, with nothing in it."""
    async with LAYERS[request.param](tmp_path) as made:
        yield made
