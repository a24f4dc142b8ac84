"""The suite's own plugins: requirements are reported as they ended, quiet tests run alone, files are compiled once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import compile_files

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["pytester"]

REQUIREMENTS = """
    import pytest

    @pytest.mark.requirement("DJ-2", "D1")
    @pytest.mark.parametrize("number", [1, 2])
    def test_holds(number):
        pass

    @pytest.mark.requirement("DJ-2")
    def test_breaks():
        assert False

    @pytest.fixture
    def untidy():
        yield
        raise RuntimeError

    @pytest.mark.requirement("D2")
    def test_breaks_at_the_end(untidy):
        pass
"""

APART = """
    import os, pathlib, pytest

    running = pathlib.Path(os.environ["RUNNING"])

    ALONE = pytest.param("alone", marks=pytest.mark.quiet(alone=True))

    @pytest.mark.parametrize("number", range(20))
    @pytest.mark.parametrize("kind", ["busy", pytest.param("quiet", marks=pytest.mark.quiet), ALONE])
    def test_runs(kind, number):
        own = running / f"{kind}-{number}"
        own.touch()
        for _ in range(200):  # long enough to be seen
            seen = [path.name for path in running.iterdir()]
            assert {name.partition("-")[0] for name in seen} == {kind}
            assert kind != "alone" or seen == [own.name]
        own.unlink()
"""


TURNS = """
    import os, pathlib, pytest

    notes, process = pathlib.Path(os.environ["RUNNING"]), os.environ["PYTEST_XDIST_WORKER"]

    @pytest.mark.parametrize("number", range(12))
    @pytest.mark.parametrize("kind", ["busy", pytest.param("quiet", marks=pytest.mark.quiet)])
    def test_runs(kind, number):
        (notes / process).touch()
        while len(list(notes.glob("gw*"))) < 2:
            pass  # until both processes are at work
        for _ in range(500 if process == "gw1" else 0):  # one of them is slower
            list(notes.iterdir())
        with (notes / "order").open("a") as order:
            order.write(f"{kind} ")
"""


FIRST = """
    import pytest

    @pytest.mark.quiet(alone=True)
    def test_alone(): pass

    @pytest.mark.quiet
    def test_a(): pass

    def test_b(): pass

    @pytest.mark.quiet
    def test_c(): pass

    def test_d(): pass

    @pytest.mark.long
    def test_e(): pass
"""


SOMETIMES = """
    import os, pathlib, pytest

    runs = pathlib.Path(os.environ["RUNNING"]) / "runs"

    @pytest.mark.parametrize("number", range(int(os.environ["TESTS"])))
    def test_fails(number):
        with runs.open("a") as noted:
            noted.write(f"{number} ")
        assert runs.read_text().count(f"{number} ") >= int(os.environ["PASSES_AT"])

    def test_passes(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a small suite with the plugins, in processes of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take longer to load than these tests
    pytester.makeini("[pytest]\nmarkers =\n  requirement(*ids)\n  long\n  quiet\n")

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        plugins = ["-p", "xdist", "-p", "tests.requirement_report", "-p", "tests.quiet", "-p", "tests.second_run"]
        return pytester.runpytest_subprocess(*plugins, *options)

    return run


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_worst_end_of_a_test_counts(suite, pytester: pytest.Pytester, workers: str):
    suite(REQUIREMENTS, "-n", workers).stdout.fnmatch_lines(["requirements: 1 passed, 2 failed, * untested of *"])
    results = json.loads((pytester.path / "build/requirements.json").read_text())
    file = "test_the_worst_end_of_a_test_counts.py"
    assert results == {
        "D1": {f"{file}::test_holds": {"passed": 2}},
        "D2": {f"{file}::test_breaks_at_the_end": {"failed": 1}},
        "DJ-2": {f"{file}::test_holds": {"passed": 2}, f"{file}::test_breaks": {"failed": 1}},
    }


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unknown_requirement_fails_the_collection(suite, workers: str):
    result = suite("import pytest\n\n@pytest.mark.requirement('DJ-2', 'DJ-999')\ndef test_x(): pass\n", "-n", workers)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*'DJ-999' is in none of requirements.md, decisions.md*"])
    assert result.parseoutcomes().get("passed", 0) == 0


def test_quiet_tests_run_beside_each_other_only_and_those_marked_alone_beside_none(
    suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    result = suite(APART, "-n", "2", "--dist", "worksteal")
    result.assert_outcomes(passed=60)


def test_quiet_tests_start_after_all_other_tests(suite, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    suite(TURNS, "-n", "2").assert_outcomes(passed=24)
    assert (tmp_path / "order").read_text().split() == ["busy"] * 12 + ["quiet"] * 12


def test_long_tests_come_first_quiet_ones_last_and_those_that_run_alone_after_them(suite):
    result = suite(FIRST, "-n", "1", "-v")
    order = [line.partition("::")[2].strip() for line in result.outlines if "PASSED" in line and "::" in line]
    assert order == ["test_e", "test_b", "test_d", "test_a", "test_c", "test_alone"]


@pytest.mark.parametrize(
    "tests,passes_at,ends,runs",
    [(3, 2, 0, "0 0 1 1 2 2"), (1, 3, 1, "0 0"), (4, 2, 1, "0 1 2 3")],
    ids=["pass alone", "fail again", "too many"],
)
def test_the_few_tests_that_failed_run_once_more_and_are_named(
    suite, pytester: pytest.Pytester, tmp_path: Path, monkeypatch, tests: int, passes_at: int, ends: int, runs: str
):
    for name, value in {"RUNNING": tmp_path, "TESTS": tests, "PASSES_AT": passes_at}.items():
        monkeypatch.setenv(name, str(value))
    suite(SOMETIMES, "-n", "2" if ends == 0 else "0")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.requirement_report")
    second = pytester.run(sys.executable, "-m", "tests.second_run")
    assert second.ret == ends
    assert sorted((tmp_path / "runs").read_text().split()) == runs.split()
    named = [line.strip() for line in second.outlines if line.startswith("  test_")]
    file = "test_the_few_tests_that_failed_run_once_more_and_are_named.py"
    assert named == ([f"{file}::test_fails[{number}]" for number in range(tests)] if ends == 0 else [])
    assert pytester.run(sys.executable, "-m", "tests.second_run").ret == 1, "what failed is run again once"


def test_bytecode_compiled_by_a_test_process_is_kept():
    asked = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "False\n"
    assert not sys.dont_write_bytecode


def test_compiled_test_file_is_used_as_it_is_and_explains_its_failures(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    path = pytester.makepyfile("def test_differs():\n    one = 1\n    assert one == 2\n")
    compile_files(pytestconfig, [path])
    before = {one: one.stat().st_mtime_ns for one in pytester.path.rglob("*.pyc")}
    assert len(before) == 1
    pytester.runpytest_subprocess("-p", "no:cacheprovider").stdout.fnmatch_lines(["E*assert 1 == 2"])
    assert {one: one.stat().st_mtime_ns for one in pytester.path.rglob("*.pyc")} == before


def test_file_that_cannot_be_compiled_does_not_keep_others_from_it(tmp_path: Path, pytestconfig: pytest.Config):
    texts = {"broken.py": "def", "test_broken.py": "def", "whole.py": "", "test_whole.py": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    compile_files(pytestconfig, [tmp_path / name for name in texts])
    assert {one.name.partition(".")[0] for one in tmp_path.rglob("*.pyc")} == {"whole", "test_whole"}
