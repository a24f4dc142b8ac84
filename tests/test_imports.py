"""What is loaded when: a program pays for the parts that it uses. Names of modules, no times."""

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest
import typer

import trellis
from trellis.cli.places import ON_THIS_MACHINE
from trellis.cli.program import LISTED, commands_of, main, make_program
from trellis.engine import errors

SOURCE = Path(trellis.__file__).parent
CRYPTOGRAPHY = ("joserfc", "cryptography")
SERVERS = ("fastapi", "starlette", "uvicorn")
PLATFORM = ("dulwich", "httpx2", "pydantic_ai", "trellis.gateway", "trellis.app.instance", "trellis.nlm_backend")
EXTRAS = ("asyncpg", "cap", "nats", "obstore", "opentelemetry.sdk", "openai", "temporalio")
ENGINE = ("apsw", "opentelemetry", "pydantic", "rich", "trellis.client", "trellis.engine.ledger", "trellis.app.wiring")
AGENTS = ("yaml", "trellis.agents", "trellis.http.shapes", "trellis.runs", "trellis.storage.memory")

RUN = "import sys; from trellis.cli import main; code = main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(code)"


def loaded(code: str, *arguments: str) -> set[str]:
    """The modules of a process that has run this; what it has loaded goes to its standard error."""
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.split())


def of(parts: tuple[str, ...], modules: set[str]) -> list[str]:
    return sorted(
        module for module in modules if any(module == part or module.startswith(f"{part}.") for part in parts)
    )


def test_importing_trellis_loads_nothing_of_it():
    modules = loaded("import sys, trellis; print(*sys.modules, file=sys.stderr)")
    assert [module for module in modules if module.startswith("trellis.")] == []
    assert of((*CRYPTOGRAPHY, *SERVERS, *PLATFORM, *EXTRAS, *ENGINE, "asyncio", "typer"), modules) == []


def test_the_version_is_printed_without_importing_the_engine():
    modules = loaded(RUN, "--version")
    assert of((*CRYPTOGRAPHY, *SERVERS, *PLATFORM, *EXTRAS, *ENGINE, *AGENTS), modules) == []


@pytest.mark.parametrize("arguments", [("jobs",), ("submit", "index.document", "{}")])
def test_a_command_on_a_ledger_loads_no_server_no_agent_and_no_cryptography(tmp_path: Path, arguments: tuple[str, ...]):
    loaded(RUN, "migrate", "--data", str(tmp_path))
    modules = loaded(RUN, *arguments, "--data", str(tmp_path))
    assert "trellis.ledgers.sqlite.ledger" in modules
    assert of((*CRYPTOGRAPHY, *SERVERS, *PLATFORM, *EXTRAS, *AGENTS, "structlog"), modules) == []


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_lists_every_command_and_loads_none(arguments: tuple[str, ...]):
    modules = loaded(RUN, *arguments)
    assert of((*CRYPTOGRAPHY, *SERVERS, *PLATFORM, *EXTRAS, *ENGINE, *AGENTS, "asyncio"), modules) == []


@pytest.mark.parametrize("arguments", [("jobs", "--help"), ("job", "show", "--help"), ("events", "--help")])
def test_the_help_of_a_command_on_jobs_loads_no_store_and_no_worker(arguments: tuple[str, ...]):
    modules = loaded(RUN, *arguments)
    working = ("apsw", "trellis.api", "trellis.bus", "trellis.client", "trellis.ledgers", "trellis.worker")
    ports = ("trellis.app.settings", "trellis.app.wiring", "trellis.engine.ledger")
    assert of((*CRYPTOGRAPHY, *SERVERS, *PLATFORM, *EXTRAS, *AGENTS, *working, *ports), modules) == []


# --- the names of the package ----------------------------------------------------------------------------------------


def declared() -> dict[str, str]:
    """What type checkers are told: name -> module."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trellis.")
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_every_lazy_name_is_declared_for_type_checkers():
    assert sorted(declared()) == sorted(trellis.__all__)
    for name, module in declared().items():
        assert getattr(trellis, name) is getattr(importlib.import_module(module), name)


def test_every_error_and_record_that_the_python_reference_names_for_callers_is_in_the_package_itself():
    page = (SOURCE.parent.parent / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    local = page[: page.index("## Callers over HTTP")]
    words = set(re.findall(r"\w+", local))
    named = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and name in words}
    records = set(re.findall(r"^### (\w+)$", local[local.index("## Records") :], re.MULTILINE))
    assert len(named) > 5
    assert len(records) > 5
    assert (named | records) - set(trellis.__all__) == set()
    assert not {"IdempotencyMismatch", "PayloadInvalid"} - set(trellis.__all__), "submits raise them"


def test_package_getattr_is_hidden_from_type_checkers():
    """A `__getattr__` that they can see makes a misspelt import right."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert "__getattr__" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_names_are_listed_and_a_star_takes_all_of_them():
    listed = "import trellis; assert set(trellis.__all__) <= set(dir(trellis))"
    taken = "from trellis import *; assert {*trellis.__all__} <= {*globals()}"
    loaded(f"{listed}; {taken}; import inspect; assert dict(inspect.getmembers(trellis))['App'] is App")


def test_missing_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'trellis' has no attribute 'Conect'"):
        trellis.Conect  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Conect' from 'trellis'"):
        exec("from trellis import Conect")
    assert not hasattr(trellis, "__path_of_another__")


def test_a_module_of_the_package_is_imported_from_it():
    loaded("from trellis import testing, App; assert testing.__name__ == 'trellis.testing'")


def test_lazily_imported_names_can_be_pickled_and_inspected():
    policy = trellis.RetryPolicy()
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert inspect.getmodule(trellis.connect) is importlib.import_module("trellis.app.wiring")


# --- the command line ------------------------------------------------------------------------------------------------


def test_commands_are_made_once_in_a_process():
    assert commands_of("jobs")["jobs"] is commands_of("jobs")["jobs"]


def test_top_level_help_repeats_the_help_of_each_command():
    there = {
        name: (module, command.rich_help_panel, command.get_short_help_str(limit=72))
        for module in {module for module, _, _ in LISTED.values()}
        for name, command in commands_of(module).items()
    }
    assert there == dict(LISTED)


def leaves(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""
    for name, command in group.commands.items():
        path = f"{above} {name}".strip()
        if hasattr(command, "commands"):
            yield from leaves(command, path)
        else:
            yield path, command


def test_every_command_works_through_a_gateway_or_says_why_it_acts_on_this_machine():
    takes = {
        path: "--gateway" in {option for parameter in command.params for option in parameter.opts}
        for path, command in leaves(typer.main.get_command(make_program()))
    }
    assert {path for path, gateway in takes.items() if not gateway} == set(ON_THIS_MACHINE)


def test_a_command_of_this_machine_that_is_given_a_gateway_says_why_not_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
):
    for path, known in ON_THIS_MACHINE.items():
        assert main([*path.split(), "--gateway", "http://127.0.0.1:1"]) == 2
        message = f"error: `trellis {path}` takes no --gateway, because it {known.because}.\n  → {known.instead}\n"
        assert capsys.readouterr().err == message
    assert main(["audit", "--gateway", "http://127.0.0.1:1"]) == 2
    assert "`trellis audit` takes no --gateway, because it works on the ledger" in capsys.readouterr().err
    for group in ([], ["policy"]):
        assert main([*group, "--gateway", "http://127.0.0.1:1"]) == 2
        assert "Give it after the command" in capsys.readouterr().err


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count: a circle of any length would be named here."""
    graph = grimp.build_graph("trellis", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    assert len(imports) > 100
    while leaves := {module for module, needs in imports.items() if not needs}:
        imports = {module: needs - leaves for module, needs in imports.items() if module not in leaves}
    assert sorted(imports) == [], "these import each other, or import modules that do"


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_every_module_can_be_the_first():
    """No module needs another one to have been imported before it."""
    every = [
        found.name for found in pkgutil.walk_packages([str(SOURCE)], "trellis.") if not found.name.endswith("__main__")
    ]
    code = """
import importlib, sys
for name in sys.argv[1:]:
    for known in [known for known in sys.modules if known.partition(".")[0] == "trellis"]:
        del sys.modules[known]
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""
    loaded(code, *every)
