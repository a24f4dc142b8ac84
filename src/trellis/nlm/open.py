"""Which provider a setting names: `extractive`, `openai`, `scripted:FILE`, or one that an installed package brings.

A package brings one by an entry point in the group `trellis.nlm`: its name is the setting's first part, and it is called
with `ProviderOptions` and returns an NlmProvider. The names above are ours and cannot be taken.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

import pydantic

from trellis.engine.clock import Clock
from trellis.nlm import extractive, scripted
from trellis.nlm.errors import NlmSettingInvalid
from trellis.nlm.provider import NlmProvider

PLUGINS = "trellis.nlm"
OPENAI = "openai"
DEFAULT = extractive.NAME
OPENAI_NEEDS = "set TRELLIS_NLM_BASE_URL and TRELLIS_NLM_MODEL, and TRELLIS_NLM_KEY if the server asks for one"


@dataclass(frozen=True, kw_only=True)
class ProviderOptions:
    """What the settings say about the provider. `argument` is what stands after the colon."""

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
    """The provider that a setting names; raises NlmSettingInvalid. The caller closes it."""
    name, _, argument = setting.partition(":")
    options = ProviderOptions(name=name, argument=argument, base_url=base_url, model=model, key=key)
    match name:
        case extractive.NAME:
            return extractive.Extractive()
        case "openai":
            return _openai(options)
        case scripted.NAME:
            return scripted.Scripted(scripted.read_script(Path(argument)), clock=clock)
        case _:
            return _plugin(options)


def _openai(options: ProviderOptions) -> NlmProvider:
    # The HTTP library takes a while to import, and only this provider needs it.
    from trellis.nlm.openai import OpenAi, OpenAiOptions

    if options.base_url is None or options.model is None:
        raise NlmSettingInvalid(setting=OPENAI, detail=OPENAI_NEEDS)
    return OpenAi(OpenAiOptions(base_url=options.base_url, model=options.model, key=options.key))


def _plugin(options: ProviderOptions) -> NlmProvider:
    found = [point for point in entry_points(group=PLUGINS) if point.name == options.name]
    if len(found) != 1:
        raise NlmSettingInvalid(setting=options.name, detail=_which(options.name, found))
    try:
        factory = found[0].load()
    except (ImportError, AttributeError) as error:
        raise NlmSettingInvalid(setting=options.name, detail=f"{found[0].value} cannot be loaded: {error}") from error
    return cast("NlmProvider", factory(options))


def _which(name: str, found: list[EntryPoint]) -> str:
    if found:
        return f"{len(found)} installed packages bring a provider of that name; remove all but one"
    known = sorted({extractive.NAME, OPENAI, f"{scripted.NAME}:FILE", *(p.name for p in entry_points(group=PLUGINS))})
    return f"nobody brings it; choose one of {', '.join(known)}, or install the package that brings {name!r}"
