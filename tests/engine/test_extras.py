"""What a user reads who needs an optional part that is not installed."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from trellis.engine.errors import ExtraMissing
from trellis.engine.extras import PACKAGES, Extra, extra_needed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("extra", Extra)
def test_an_error_about_a_missing_package_names_its_extra(extra: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    package = min(PACKAGES[extra])
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing) as refused, extra_needed(extra, "This"):
        importlib.import_module(package)
    expected = f"This needs packages that are not installed ({package}): pip install 'trellis-engine[{extra}]'"
    assert str(refused.value) == expected


def test_a_module_of_no_extra_is_not_taken_for_one() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), extra_needed(Extra.S3, "This"):
        importlib.import_module("no_such_module")


def test_every_extra_that_is_named_can_be_installed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(Extra) <= set(declared)
