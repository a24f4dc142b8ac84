"""Opens the provider that a setting names: `extractive`, `openai`, `scripted:FILE`, or one from an installed package.

A package provides one with an entry point in the group `trellis.nlm`. Its name is the setting's first part; it is
called with `ProviderOptions` and returns an NlmProvider. The names above are reserved.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pydantic

from trellis.engine.clock import Clock
from trellis.engine.errors import SettingsInvalid
from trellis.engine.extras import load_plugin
from trellis.nlm import extractive, scripted
from trellis.nlm.provider import NlmProvider, NlmSettingInvalid

PLUGINS = "trellis.nlm"
OPENAI = "openai"
DEFAULT = extractive.NAME
ASKS_BACKEND = "backend"
"""The provider that asks the NLM backend. It needs a token of the process, so `open_provider` does not open it."""
OPENAI_NEEDS = "set TRELLIS_NLM_BASE_URL and TRELLIS_NLM_MODEL, and TRELLIS_NLM_KEY if the server asks for one"


@dataclass(frozen=True, kw_only=True)
class ProviderOptions:
    """The provider's settings. `argument` is the text after the colon."""

    name: str
    argument: str = ""
    base_url: str | None = None
    model: str | None = None
    key: pydantic.SecretStr | None = None


def open_provider(
    setting: str = DEFAULT,
    *,
    clock: Clock,
    base_url: str | None = None,
    model: str | None = None,
    key: pydantic.SecretStr | None = None,
) -> NlmProvider:
    """Open the provider that a setting names; raises NlmSettingInvalid. The caller closes it."""
    name, _, argument = setting.partition(":")
    options = ProviderOptions(name=name, argument=argument, base_url=base_url, model=model, key=key)
    match name:
        case extractive.NAME:
            return extractive.ExtractiveProvider()
        case "openai":
            return _openai(options)
        case scripted.NAME:
            return scripted.ScriptedProvider(scripted.read_script(Path(argument)), clock=clock)
        case _:
            return _plugin(options)


def _openai(options: ProviderOptions) -> NlmProvider:
    # Imported here: the HTTP library is slow to import, and only this provider needs it.
    from trellis.nlm.openai import OpenAiOptions, OpenAiProvider

    if options.base_url is None or options.model is None:
        raise NlmSettingInvalid(setting=OPENAI, detail=OPENAI_NEEDS)
    return OpenAiProvider(OpenAiOptions(base_url=options.base_url, model=options.model, key=options.key))


def _plugin(options: ProviderOptions) -> NlmProvider:
    ours = (extractive.NAME, OPENAI, ASKS_BACKEND, f"{scripted.NAME}:FILE")
    try:
        factory = load_plugin(PLUGINS, options.name, ours=ours)
    except SettingsInvalid as error:
        raise NlmSettingInvalid(setting=options.name, detail=str(error.data["detail"])) from error
    return cast("NlmProvider", factory(options))
