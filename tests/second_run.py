"""Runs the few tests that failed in a whole run once more, alone on the machine.

Some tests are judged by a browser, by leases that end or by processes that are killed. A machine that stands still for a moment
can fail one of them. As a pytest plugin this file notes which tests failed. `python -m tests.second_run` runs those again in one
process, with nothing beside them, and ends with that run's result. It names every test that passed only then: such a test has a
defect, or has found one. More than a few failures are never run again: then something is wrong.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAILED = Path("build/failed-tests.json")
FAILURES_MAX = 3
WHAT_IT_MEANS = "Each has a defect, or has found one:"

_failed: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    FAILED.unlink(missing_ok=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    only_tests_failed = exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldfail
    FAILED.parent.mkdir(exist_ok=True)
    FAILED.write_text(json.dumps(sorted(_failed) if only_tests_failed else []), encoding="utf-8")


def main() -> int:
    """Returns the exit status of the second run, or 1 where there is none."""
    failed: list[str] = json.loads(FAILED.read_text(encoding="utf-8")) if FAILED.exists() else []
    FAILED.unlink(missing_ok=True)
    if not 0 < len(failed) <= FAILURES_MAX:
        return 1
    sys.stdout.write(f"\nRunning what failed once more, alone: {len(failed)} of at most {FAILURES_MAX} tests.\n")
    sys.stdout.flush()
    again = [sys.executable, "-m", "pytest", "--requirement-results=build/requirements-second.json", *failed]
    result = subprocess.run(again, check=False).returncode
    if result == 0:
        sys.stdout.write(f"\nThese tests failed in the whole run and passed alone. {WHAT_IT_MEANS}\n")
        sys.stdout.writelines(f"  {one}\n" for one in failed)
    return result


if __name__ == "__main__":
    sys.exit(main())
