"""Compiles the program and its tests on every core, before one process collects the tests.

In a new checkout nothing is compiled. The process that collects the tests would compile all of it on one core: 8 s of processor time.
pytest compiles test files in its own way, and keeps the outcome beside the usual one. What is compiled already is left alone.

In the same checkout hypothesis has not read the program's constants, which it tries as inputs. It does so when the tests are collected,
on one core: 4 s. `remember_constants()` does it in another process, and hypothesis finds them in its folder.
"""

import compileall
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests")
REWRITTEN = ("test_*.py", "conftest.py")
"""The names of the files that pytest compiles in its own way."""


def compile_everything(config: pytest.Config) -> None:
    """Compile in as many processes as there are cores. What is wrong with a file is reported by the process that imports it."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    cores = os.cpu_count() or 1
    children = [_forked(config, paths[number::cores]) for number in range(cores)]
    for child in children:
        os.waitpid(child, 0)


def _forked(config: pytest.Config, paths: Sequence[Path]) -> int:
    """The id of a process that compiles these files."""
    child = os.fork()
    if child == 0:
        try:
            compile_files(config, paths)
        finally:
            os._exit(0)  # whatever happened: this process must not go on as a second suite
    return child


def compile_files(config: pytest.Config, paths: Sequence[Path]) -> None:
    """Compile what can be compiled, as whoever imports it in a test process does."""
    for path in paths:
        with contextlib.suppress(SyntaxError, ValueError, OSError):
            _compile(config, path)


def _compile(config: pytest.Config, path: Path) -> None:
    if not any(map(path.match, REWRITTEN)):
        compileall.compile_file(path, quiet=2)
        return
    place = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, place) is None and rewrite.try_makedirs(place.parent):
        digest, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, place)


def remember_constants() -> None:
    """Let hypothesis keep the constants of each module of the program, as if it was imported."""
    from hypothesis.internal.constants_ast import constants_from_module

    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)
