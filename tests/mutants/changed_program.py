"""A pytest plugin for the process that runs tests on a changed copy of the program.

It makes sure that the copy is what the tests import, and writes down how each test ended: in which part of the
test, and whether a line of the tests itself found what it did not expect. That is an assertion that does not hold, or an
answer without the field that the test looks at; it is no error of the program, of an import or of a library.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

import trellis

TESTS = Path(__file__).resolve().parents[1]
COPY = "TRELLIS_MUTANT_COPY"  # the folder that holds the changed package
ENDS = "TRELLIS_MUTANT_ENDS"  # the file for how the tests ended, one JSON object per line


def pytest_configure() -> None:
    imported = Path(trellis.__file__).resolve()
    if not imported.is_relative_to(Path(os.environ[COPY]).resolve()):
        raise pytest.UsageError(f"the tests would import {imported}, which is not the changed copy")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    noticed = call.excinfo is not None and _is_of_the_tests(call.excinfo)
    end = {"test": item.nodeid, "when": report.when, "outcome": report.outcome, "noticed": noticed}
    end["marks"] = sorted({str(name) for mark in item.iter_markers("requirement") for name in mark.args})
    with Path(os.environ[ENDS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(end) + "\n")
    return report


def _is_of_the_tests(error: pytest.ExceptionInfo[BaseException]) -> bool:
    path = Path(error.traceback[-1].path)
    if isinstance(error.value, (AssertionError, pytest.fail.Exception)):
        return not path.is_relative_to(os.environ[COPY])
    return path.is_relative_to(TESTS) and isinstance(error.value, (LookupError, ValueError))
