"""The TypeScript client as npm packs it, imported by a program of Node on a real gateway."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.console.conftest import NODE, ROOT, ConsoleServer
from trellis.lifecycles import Role

sys.path.append(str(ROOT / "tools"))
from tools import console  # it imports its neighbours as a program does


def packed(folder: Path) -> None:
    """Put the packed client into this folder's `node_modules`."""
    with console.one_at_a_time():
        console.package()
        console.unpack_client(folder)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_example_of_the_packed_client_lists_jobs_and_follows_a_run(server: ConsoleServer, tmp_path: Path):
    (waiting,) = server.queued_jobs(1, type_="packed.wait")
    await asyncio.to_thread(packed, tmp_path)
    (tmp_path / "example.mjs").write_text(console.example())
    token = server.token(Role.OWNER, Role.CONTROL_PLANE)
    names = {"TRELLIS_GATEWAY": server.url, "TRELLIS_TOKEN": token}
    printed = await asyncio.to_thread(run, NODE, "example.mjs", cwd=tmp_path, **names)
    assert f"{waiting} packed.wait queued" in printed
    events = [line.split() for line in printed.splitlines() if line.startswith("run.status.changed")]
    assert [one[-1] for one in events][-1] == "completed"
    assert len({one[1] for one in events}) == 1
