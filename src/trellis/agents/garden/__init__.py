"""The demo garden: two agents with sources and an initial memory, shipped with the package.

`plant` only creates. Existing objects stay as their owner left them, so planting twice, or completing a planting after
a crash, gives the same garden. An agent's file is written last: an agent that can be found has its sources. Memory is
kept in git, so `memory_seed` only returns its initial files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from trellis.agents.catalog import AGENT_FILE, agent_key
from trellis.agents.definition import SOURCES_FOLDER, checked_slug
from trellis.storage.memory.layout import LAYER_1
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored

AGENTS = ("archivist-violin", "architect-guardian")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantReport:
    """The keys that were created, and those that existed."""

    created: tuple[str, ...]
    kept: tuple[str, ...]


async def plant(objects: ObjectStore) -> PlantReport:
    """Create the garden's agents where they do not exist."""
    created: list[str] = []
    kept: list[str] = []
    for key, body in (pair for slug in AGENTS for pair in objects_of(slug).items()):
        stored = isinstance(await objects.put(key, body, when=CREATE), PutStored)
        (created if stored else kept).append(key)
    return PlantReport(created=tuple(created), kept=tuple(kept))


def objects_of(slug: str) -> Mapping[str, bytes]:
    """The objects of one agent by key, in the order of writing: the sources, then the agent's file."""
    folder = _folder(slug)
    sources = sorted(folder.joinpath(SOURCES_FOLDER).iterdir(), key=lambda file: file.name)
    bodies = {object_key("agents", slug, SOURCES_FOLDER, file.name): file.read_bytes() for file in sources}
    return {**bodies, agent_key(slug): folder.joinpath(AGENT_FILE).read_bytes()}


def memory_seed(slug: str) -> Mapping[str, str]:
    """The initial files of an agent's memory, by name: snapshot, open loops, facts."""
    folder = _folder(slug).joinpath("memory")
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in LAYER_1}


def _folder(slug: str) -> Traversable:
    return files(__name__).joinpath(checked_slug(slug))
