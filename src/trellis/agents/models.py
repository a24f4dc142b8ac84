"""Opens the model that an agent's file names.

`offline` needs no key and no network. `openai:<model>` is any server with OpenAI's chat completions API; its address
and key come from settings. Messages name the address, without credentials, and never the key. `scripted:<name>` is a function that a test provides.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from trellis.agents.errors import ModelSettingInvalid, ModelUnknown
from trellis.agents.run_io import BASE_URL_SETTING, OPENAI, ModelOptions
from trellis.engine.extras import Extra, extra_needed

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from pydantic_ai.models import Model

OFFLINE = "offline"
LIBRARY = "openai"
"""The package behind it, installed by an extra."""
SCRIPTED = "scripted"
KNOWN = f"{OFFLINE}, or {OPENAI}:<model>"
KEY_SETTING = "TRELLIS_MODEL_KEY"
BASE_URL_EXAMPLE = "http://127.0.0.1:11434/v1"


def model_problem(name: str) -> str | None:
    """What to correct if no runtime could open a model of this name; None for a name that one may."""
    kind, _, rest = name.partition(":")
    known = name == OFFLINE or (kind in {OPENAI, SCRIPTED} and rest)
    return None if known else f"model: {ModelUnknown(model=name, known=KNOWN)}"


def check_model(name: str, options: ModelOptions) -> None:
    """Check that a model of this name can be opened; raises ModelUnknown or ModelSettingInvalid."""
    kind, _, rest = name.partition(":")
    if kind == OPENAI and rest:
        address = f"{BASE_URL_SETTING} to the server's address, such as {BASE_URL_EXAMPLE}"
        key = f"{KEY_SETTING} to its key (any word for a server that asks for none)"
        missing = [text for value, text in ((options.base_url, address), (options.key, key)) if not value]
        if missing:
            where = f", in the environment of {options.process}, which executes the run" if options.process else ""
            raise ModelSettingInvalid(model=name, detail=f"set {', and '.join(missing)}{where}")
        if find_spec(LIBRARY) is None:
            raise ModelSettingInvalid(
                model=name, detail=f"pip install 'trellis-engine[{Extra.OPENAI}]' for the package {LIBRARY}"
            )
    elif not (name == OFFLINE or (kind == SCRIPTED and rest in options.scripts)):
        raise ModelUnknown(model=name, known=KNOWN)


@asynccontextmanager
async def open_model(name: str, options: ModelOptions) -> "AsyncGenerator[Model]":
    """The model of this name, for one run.

    Opened in a thread, because importing pydantic-ai takes seconds the first time.
    """
    check_model(name, options)
    model, client = await asyncio.to_thread(_open, name, options)
    try:
        yield model
    finally:
        if client is not None:
            await client.close()


def _open(name: str, options: ModelOptions) -> "tuple[Model, AsyncOpenAI | None]":
    kind, _, rest = name.partition(":")
    if kind == OPENAI:
        return _openai(name, rest, options)
    if kind == SCRIPTED:
        from pydantic_ai.models.function import FunctionModel

        return FunctionModel(options.scripts[rest], model_name=name), None
    from trellis.agents.offline.model import OfflineModel

    return OfflineModel(), None


def _openai(name: str, model: str, options: ModelOptions) -> "tuple[Model, AsyncOpenAI]":
    with extra_needed(Extra.OPENAI, f"The model {name}"):
        from openai import AsyncOpenAI
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider
    # The step is retried (D7); a second layer of retries would multiply the first.
    # The client would put its paths behind a query that stands in the base URL, such as `?api-version=1`.
    address = urlsplit(options.base_url or "")
    client = AsyncOpenAI(
        base_url=address._replace(query="").geturl(),
        default_query=dict(parse_qsl(address.query, keep_blank_values=True)),
        api_key=options.key,
        max_retries=0,
        timeout=options.request_timeout_s,
    )
    return OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)), client
