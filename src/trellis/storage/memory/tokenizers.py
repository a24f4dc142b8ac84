"""Which token counter a setting names (D50): `bytes`, the upper estimate, or one that an installed package brings.

A package brings one by an entry point in the group `trellis.tokenizers`: a function of a text that returns how many tokens it has.
"""

from typing import Any, cast

from trellis.engine.errors import SettingsInvalid
from trellis.engine.plugins import load_plugin
from trellis.storage.memory.layout import TokenCounter, count_tokens

BYTES = "bytes"
PLUGINS = "trellis.tokenizers"
SAMPLE = "Who made the violin?"


def open_tokenizer(setting: str = BYTES) -> TokenCounter:
    """The counter of this name, tried once on a sentence; raises SettingsInvalid."""
    if setting == BYTES:
        return count_tokens
    try:
        brought = load_plugin(PLUGINS, setting, ours=(BYTES,))
    except SettingsInvalid as error:
        raise SettingsInvalid(source=f"tokenizer {setting!r}", detail=str(error.data["detail"])) from error
    tried: Any = brought(SAMPLE) if callable(brought) else None
    if not isinstance(tried, int) or tried < 1:
        detail = f"it must be a function that returns how many tokens a text has, and for {SAMPLE!r} it gave {tried!r}"
        raise SettingsInvalid(source=f"tokenizer {setting!r}", detail=detail)
    return cast("TokenCounter", brought)
