"""A writer that is killed, at any system call or at any moment, leaves the old object or the new one."""

import asyncio
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.servers.ready_python import ready_python
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import CREATE, PutStored, if_match

ROOT = Path(__file__).resolve().parents[2]
SIZE = 200_000
CALLS = ("open", "write", "fsync", "link", "replace", "unlink", "mkdir", "close", "dup")

# For n = 1, 2, …: a child puts as told in a folder of its own and kills itself at the n-th of the calls, before or right
# after it. Prints n and how the child ended, until one lives.
_NURSERY = f"""
import asyncio, os, signal, sys
from pathlib import Path
from trellis.storage.objects.store import CREATE, OVERWRITE, if_match
from trellis.storage.objects import file_systems
from trellis.storage.objects.open import open_objects

base, verb, after = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "after"

if verb == "create with a scratch name":
    file_systems.LINKS_UNNAMED = frozenset()

def deadly(call, at, seen=[0]):
    def counted(*args, **kwargs):
        seen[0] += 1
        dies = seen[0] == at
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call(*args, **kwargs)
        finally:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
    return counted

async def prepare(folder):
    store = await open_objects(folder.as_uri())
    if not verb.startswith("create"):
        await store.put("a/b/k.json", b"old")
    await store.close()

async def put(folder, at):
    store = await open_objects(folder.as_uri())
    found = await store.get("a/b/k.json")
    when = if_match(found.etag) if verb == "match" else CREATE if verb.startswith("create") else OVERWRITE
    for name in {CALLS}:
        setattr(os, name, deadly(getattr(os, name), at))
    await store.put("a/b/k.json", b"new" * {SIZE}, when=when)

for at in range(1, 100):
    asyncio.run(prepare(base / str(at)))
    child = os.fork()
    if not child:
        asyncio.run(put(base / str(at), at))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(at, code, flush=True)
    if not code:
        break
"""

_WRITES_ON = f"""
import asyncio, sys
from pathlib import Path
from trellis.storage.objects.open import open_objects

async def main():
    store = await open_objects(Path(sys.argv[1]).as_uri())
    number = int(sys.argv[2])
    while True:
        number += 1
        await store.put("k.bin", number.to_bytes(8) * {SIZE // 8})
        sys.stdout.write(f"{{number}}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", ["create", "create with a scratch name", "overwrite", "match"])
def test_killed_at_any_system_call_a_put_is_whole_or_did_not_happen(tmp_path: Path, verb: str, when: str):
    told = subprocess.run(
        [ready_python(), "-c", _NURSERY, tmp_path, verb, when], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ends = [tuple(map(int, line.split())) for line in told.stdout.splitlines()]
    assert [code for _, code in ends] == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    assert len(ends) > 8
    bodies = [asyncio.run(_after_death(tmp_path / str(at))) for at, _ in ends]
    assert set(bodies) == {None if verb.startswith("create") else b"old", b"new" * SIZE}
    assert bodies[-1] == b"new" * SIZE


async def _after_death(folder: Path) -> bytes | None:
    """What is there, after a check that everything works on."""
    store = await open_objects(folder.as_uri())
    assert list((folder / ".trellis" / "scratch").iterdir()) == []
    found, info = await store.get("a/b/k.json"), await store.head("a/b/k.json")
    assert (found and found.etag) == (info and info.etag)
    assert isinstance(await store.put("a/b/k.json", b"next", when=if_match(found.etag) if found else CREATE), PutStored)
    await store.close()
    return found.body if found else None


async def test_killed_at_random_moments_no_object_is_torn_and_none_that_was_stored_is_lost(tmp_path: Path):
    store = await open_objects(tmp_path.as_uri())
    rng, number = random.Random(7), 0
    for _ in range(12):
        writer = await asyncio.create_subprocess_exec(
            ready_python(), "-c", _WRITES_ON, str(tmp_path), str(number), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 12)):
            number = int(await writer.stdout.readline())
        for _ in range(rng.randrange(20_000)):  # a moment of no particular length, without a clock
            pass
        writer.kill()
        told = (await writer.communicate())[0].split(b"\n")[:-1]
        number = int(told[-1]) if told else number
        found = await store.get("k.bin")
        assert found is not None
        seen = int.from_bytes(found.body[:8])
        assert found.body == seen.to_bytes(8) * (SIZE // 8)
        assert seen in {number, number + 1}
        number = seen
        assert isinstance(await store.put("k.bin", found.body, when=if_match(found.etag)), PutStored)
    await store.close()
    reopened = await open_objects(tmp_path.as_uri())
    assert list((tmp_path / ".trellis" / "scratch").iterdir()) == []
    await reopened.close()
