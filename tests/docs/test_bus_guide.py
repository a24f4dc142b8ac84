"""docs/how-to/run-the-bus.md does what it says, and names every setting, field and hold of the bus."""

from pathlib import Path

import pytest

from tests.docs.documents import ROOT, run
from trellis.app.settings import Settings
from trellis.bus.pointers import BYTES_MAX
from trellis.bus.services import BusRole
from trellis.bus.topics import Pool, Tenant, Topic
from trellis.cli.up_process import SAFETY_KERNEL
from trellis.operations.explain import HOLD_PHRASES
from trellis.worker.kinds import BUS_FIELDS

PAGE = ROOT / "docs" / "how-to" / "run-the-bus.md"


@pytest.mark.prove
@pytest.mark.requirement("BUS-1", "BUS-9")
def test_bus_guide_commands_work(tmp_path: Path):
    printed = run(PAGE, tmp_path, {})
    assert '"status": "SUCCEEDED"' in printed
    assert '"hello"' in printed
    assert "is SUCCEEDED, ended" in printed


def test_the_guide_names_every_setting_field_role_and_hold():
    text = PAGE.read_text(encoding="utf-8")
    named = [name for name in Settings.model_fields if name.startswith(("bus", "safety", "redis", "policy"))]
    assert [name for name in named if f"TRELLIS_{name.upper()}" not in text] == []
    for shape in (Topic, Pool, Tenant):
        for name, field in shape.model_fields.items():
            assert f"{name} = " in text, name
            if isinstance(field.default, float) and field.default > 1:
                assert f"{name} = {field.default:g}".replace("e+05", "") in text or f"{field.default:.0f}" in text, name
    assert [name for name in (*BUS_FIELDS, "payload") if f"`{name}`" not in text] == []
    assert [role for role in (*BusRole, SAFETY_KERNEL) if f"`{role}`" not in text] == []
    assert [kind for kind in HOLD_PHRASES if f"`{kind}`" not in text] == []
    assert f"{BYTES_MAX // 1024 // 1024} MiB" in text
