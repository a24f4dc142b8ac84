"""The clock of a process goes on while its machine sleeps, and a token's end is measured with the same one."""

import sys
import time

import pytest

from trellis.app.wiring import SystemClock, principal_for
from trellis.auth.tokens import Identity
from trellis.lifecycles import Role


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python's own clock is taken")
def test_time_that_the_machine_slept_has_passed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 28_805.0}.__getitem__)
    assert SystemClock().monotonic() == 28_805.0
    ada = Identity(name="ada", roles=frozenset({Role.SUBMITTER}), issuer="trellis", expires_at=1_060.0)
    assert principal_for("sqlite://", name="x", operator=False, identity=ada).until == 28_865.0
