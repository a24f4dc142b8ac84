"""What a run left behind, in a form in which two runs of the same request are equal byte for byte.

Only what must differ is replaced, and each by a name that says what it is: the run's id, its proposals' ids, moments, durations, commits
of the memory, and the digest of a file that holds any of these. A digest is replaced only if it is the digest of that very file, and a
proposal's version only if it is the number of its events, so that a wrong one stays and shows.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trellis.documents import ids, run_documents
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.objects.store import ObjectStore

MOMENT = re.compile(rb"(\d{4}-\d{2}-\d{2}T)?\d{2}:\d{2}:\d{2}(\.\d+)?(Z|\+00:00)")
DURATION = re.compile(rb'(?<="duration_ms": )\d+')
LOST = "lease expired"
"""The cause of an event that a dead holder's job got from the sweep."""
PAGE = 1_000


@dataclass(frozen=True, kw_only=True)
class Left:
    """Everything that one run left, as it is."""

    slug: str
    run_id: str
    files: Mapping[str, bytes]
    """By key: the run's folder and its proposals."""
    proposals: Sequence[str]
    events: Mapping[str, Sequence[Event]]
    """Of the run and of its proposals, by id."""
    memory: str
    """All that changed in the agent's memory, as text."""
    commits: Sequence[str]
    """Of the agent's memory, oldest first."""


async def left_by(ledger: Ledger, objects: ObjectStore, memory: MemoryRepository, slug: str, run_id: str) -> Left:
    """Look at everything."""
    proposals = [
        one
        for event in await ledger.events(JobId(run_id))
        if event.type == run_documents.STEP_DONE
        for one in json.loads(event.data or b"{}").get("proposals_created", ())
    ]
    keys = [info.key for info in (await objects.list(ids.run_folder(slug, run_id) + "/", limit=PAGE)).items]
    keys += [info.key for info in (await objects.list(f"agents/{slug}/proposals/", limit=PAGE)).items]
    files: dict[str, bytes] = {}
    for key in keys:
        found = await objects.get(key)
        assert found is not None, key
        files[key] = found.body
    history = (await asyncio.to_thread(memory.history, slug, limit=200)).entries
    newest = (await asyncio.to_thread(memory.read, slug)).version
    return Left(
        slug=slug,
        run_id=run_id,
        files=files,
        proposals=proposals,
        events={one: await ledger.events(JobId(one)) for one in (run_id, *proposals)},
        memory=await asyncio.to_thread(memory.diff, slug, 1, newest, deep=True),
        commits=[one.commit for one in reversed(history)],
    )


def normal(left: Left) -> dict[str, bytes]:
    """By normal key, the normal bytes; `memory` and `events/…` beside the published files."""
    names = _names(left)
    digests = {
        hashlib.sha256(body).hexdigest().encode(): f"<sha256 of {_renamed(key.encode(), names).decode()}>".encode()
        for key, body in left.files.items()
    }
    found: dict[str, bytes] = {}
    for key, body in left.files.items():
        text = _with_versions(left, key, body)
        for digest, name in digests.items():
            text = text.replace(digest, name)
        found[_renamed(key.encode(), names).decode()] = _renamed(text, names)
    for one, events in left.events.items():
        name = _renamed(one.encode(), names).decode()
        found[f"events/{name}"] = " ".join(_targets(events)).encode()
    found["memory"] = _renamed(left.memory.encode(), names)
    found["commits"] = str(len(left.commits)).encode()
    return found


def _names(left: Left) -> list[tuple[bytes, bytes]]:
    """What is replaced by what, in this order: ids hold their day, so that days come last."""
    names = [(left.run_id, "<run>")]
    names += [(one, f"<proposal {number}>") for number, one in enumerate(left.proposals, 1)]
    names += [(one, f"<commit {number}>") for number, one in enumerate(left.commits, 1)]
    days = sorted({f"{event.ts:%Y-%m-%d}" for events in left.events.values() for event in events})
    return [(old.encode(), new.encode()) for old, new in [*names, *((day, "<day>") for day in days)]]


def _renamed(text: bytes, names: Sequence[tuple[bytes, bytes]]) -> bytes:
    text = DURATION.sub(b"<duration>", MOMENT.sub(b"<moment>", text))
    for old, new in names:
        text = text.replace(old, new)
    return text


def _with_versions(left: Left, key: str, body: bytes) -> bytes:
    """A proposal whose engine died has two events more; its version follows from them."""
    proposal = key.rpartition("/")[2].removesuffix(".json")
    if proposal not in left.proposals:
        return body
    tail = f'"version": {len(left.events[proposal])}\n}}\n'.encode()
    return body[: -len(tail)] + b'"version": <events>\n}\n' if body.endswith(tail) else body


def _targets(events: Sequence[Event]) -> list[str]:
    """The states it went through, without those that only a death and its repair added."""
    targets: list[str] = []
    for event in events:
        if event.cause == LOST and targets[-1:] == ["applying"]:
            targets.pop()
        else:
            targets.append(event.target)
    return targets
