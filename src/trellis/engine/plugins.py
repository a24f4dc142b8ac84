"""Parts that an installed package brings, by an entry point: its group says what kind of part it is, its name is what the setting says."""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from trellis.engine.errors import SettingsInvalid


def load_plugin(group: str, name: str, *, ours: Iterable[str]) -> Any:
    """The object that one installed package brings under this name; raises SettingsInvalid, which names what can be chosen."""
    brought = entry_points(group=group)
    found = [point for point in brought if point.name == name]
    if not found:
        known = ", ".join(sorted({*ours, *(point.name for point in brought)}))
        detail = f"nobody brings it; choose one of {known}, or install the package that brings {name!r}"
        raise SettingsInvalid(source=name, detail=detail)
    if len(found) > 1:
        detail = f"{len(found)} installed packages bring one of that name; remove all but one"
        raise SettingsInvalid(source=name, detail=detail)
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise SettingsInvalid(source=name, detail=f"{found[0].value} cannot be loaded: {error}") from error
