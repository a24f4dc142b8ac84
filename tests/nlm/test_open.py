"""Which provider a setting opens."""

import json
import subprocess
import sys

import pydantic
import pytest

from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.open import open_provider
from trellis.nlm.openai import OpenAiProvider
from trellis.nlm.provider import NlmQuestion, NlmSettingInvalid, NlmSource
from trellis.nlm.scripted import ScriptedProvider
from trellis.testing import FakeClock

PLUGIN = """
from trellis.nlm.extractive import ExtractiveProvider

class Plugin(ExtractiveProvider):
    name = "garden"

def make(options):
    plugin = Plugin()
    plugin.options = options
    return plugin
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with entry points, the way an installer leaves it."""

    def put(name: str, entry_points: str, code: str = PLUGIN) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[trellis.nlm]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.mark.requirement("NLM-8")
async def test_the_default_provider_needs_no_settings():
    provider = open_provider(clock=FakeClock())
    assert isinstance(provider, ExtractiveProvider)
    sources = (NlmSource("a.md", "The lease lasts thirty seconds."),)
    question = NlmQuestion(text="How long does the lease last?", sources=sources)
    assert (await provider.query(await provider.prepare(sources), question, deadline_s=30)).confident


@pytest.mark.requirement("NLM-8")
async def test_openai_takes_its_address_model_and_key():
    provider = open_provider(
        "openai", clock=FakeClock(), base_url="https://host/v1", model="m", key=pydantic.SecretStr("k")
    )
    assert isinstance(provider, OpenAiProvider)
    await provider.close()
    with pytest.raises(NlmSettingInvalid, match="TRELLIS_NLM_BASE_URL and TRELLIS_NLM_MODEL"):
        open_provider("openai", clock=FakeClock(), model="m")


async def test_a_script_is_read_from_its_file(tmp_path):
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"steps": [{"status": 503}]}))
    assert isinstance(open_provider(f"scripted:{file}", clock=FakeClock()), ScriptedProvider)


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, "cannot be read"),
        ("{", "Invalid JSON"),
        ('{"steps": []}', "steps"),
        ('{"steps": [{}]}', "exactly one of"),
        ('{"steps": [{"status": 503, "raw": "x"}]}', "exactly one of"),
        ('{"steps": [{"statsu": 503}]}', "statsu"),
        ('{"steps": [{"status": 200}]}', "status"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused(tmp_path, content, problem):
    file = tmp_path / "script.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(NlmSettingInvalid, match=problem):
        open_provider(f"scripted:{file}", clock=FakeClock())


@pytest.mark.requirement("NLM-8")
def test_a_package_can_bring_a_provider(install):
    install("garden_plugin", "garden = garden_plugin:make")
    provider = open_provider("garden:north", clock=FakeClock(), model="m")
    assert provider.name == "garden"
    options = provider.options  # pyright: ignore[reportAttributeAccessIssue]
    assert (options.name, options.argument, options.model) == ("garden", "north", "m")


def test_unknown_provider_is_refused_with_a_list_of_providers(install):
    install("garden_plugin_listed", "garden = garden_plugin_listed:make")
    with pytest.raises(NlmSettingInvalid, match="extractive, garden, openai, scripted:FILE"):
        open_provider("oracle", clock=FakeClock())


@pytest.mark.parametrize("target", ["no_such_module_anywhere:make", "garden_plugin_broken:nothing"])
def test_a_provider_that_cannot_be_loaded_is_refused(install, target):
    install("garden_plugin_broken", f"garden = {target}")
    with pytest.raises(NlmSettingInvalid, match="cannot be loaded"):
        open_provider("garden", clock=FakeClock())


def test_two_packages_cannot_bring_the_same_provider(install):
    install("garden_one", "garden = garden_one:make")
    install("garden_two", "garden = garden_two:make")
    with pytest.raises(NlmSettingInvalid, match="remove all but one"):
        open_provider("garden", clock=FakeClock())


def test_a_plugin_cannot_replace_a_built_in_provider(install):
    install("garden_thief", "extractive = garden_thief:make")
    assert type(open_provider("extractive", clock=FakeClock())) is ExtractiveProvider


def test_opening_the_default_loads_no_http_library():
    code = "import sys, trellis.nlm.open; sys.exit('httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
