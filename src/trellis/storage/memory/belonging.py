"""Which memory repository belongs to an instance: recorded once in its object store, and compared at every start.

A gateway with another path would make an empty repository there and answer from it, and nobody would notice. A repository's
id is a ref in it, so that a mirrored clone, moved or restored, is still the same repository.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from dulwich.objects import Blob
from dulwich.refs import Ref
from dulwich.repo import Repo

from trellis.engine.private_files import file_mode, folder_mode
from trellis.storage.memory.bare import restrict_tree, unavailable_on_os_error
from trellis.storage.memory.errors import MemoryOfAnother
from trellis.storage.objects import CREATE, ObjectStore

KEY = "system/memory.json"
REF = Ref(b"refs/trellis/id")


def repository_id(path: Path, new_id: Callable[[], str]) -> str:
    """The id of the repository at this path; one that has none gets one, the same for all that ask at once."""
    with unavailable_on_os_error(), contextlib.closing(Repo(path, bare=True)) as repo:
        if REF not in repo.refs:
            blob = Blob.from_string(new_id().encode())
            repo.object_store.add_object(blob)
            repo.refs.add_if_new(REF, blob.id)
            top, name = path.stat().st_mode, blob.id.decode()
            restrict_tree(path / "refs" / "trellis", top)
            shard = path / "objects" / name[:2]
            shard.chmod(folder_mode(top))
            (shard / name[2:]).chmod(file_mode(top) & 0o444)
        return repo.refs[REF].decode()


async def check_belonging(objects: ObjectStore, repository: str, path: Path) -> None:
    """Record that this repository is the instance's, if none is recorded; raises MemoryOfAnother where it is another."""
    found = await objects.get(KEY)
    if found is None:
        await objects.put(KEY, json.dumps({"repository": repository}).encode(), when=CREATE)
        found = await objects.get(KEY)  # another process may have been first
    if found is not None and json.loads(found.body).get("repository") != repository:
        raise MemoryOfAnother(path=path, key=KEY)
