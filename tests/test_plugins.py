"""The suite's own plugins: tests run in forked processes, quiet ones alone, requirements are reported as they ended."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.internal.constants_ast import constants_from_module

from tests import compiled
from tests.compiled import compile_files, remember_constants
from tests.processes import OF_ONE_FILE_MAX, Shares

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

    notes = pathlib.Path(os.environ["RUNNING"])

    @pytest.mark.parametrize("number", range(12))
    @pytest.mark.parametrize("kind", ["busy", pytest.param("quiet", marks=pytest.mark.quiet)])
    def test_runs(kind, number):
        process = f"process-{os.getpid()}"
        (notes / process).touch()
        while len(at_work := sorted(notes.glob("process-*"))) < 2:
            pass  # until both processes are at work
        for _ in range(500 if process == at_work[0].name else 0):  # one of them is slower
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


DEATHS = """
    import os, pathlib, pytest

    with (pathlib.Path(os.environ["RUNNING"]) / "imports").open("a") as imports:
        imports.write("once ")

    @pytest.mark.parametrize("number", range(20))
    def test_dies(number):
        if number in (3, 4, 17):
            os._exit(0)

    @pytest.mark.parametrize("number", range(20))
    def test_says(number, capfd):
        print(number)
        assert capfd.readouterr().out == f"{number}\\n"
"""


INTERRUPTED = """
    import os, pathlib, pytest, signal

    notes = pathlib.Path(os.environ["RUNNING"])

    @pytest.fixture(scope="session")
    def server():
        yield
        (notes / str(os.getpid())).touch()

    @pytest.mark.parametrize("number", range(2))
    def test_waits(server, number):
        (notes / f"waits-{number}").touch()
        while len(list(notes.glob("waits-*"))) < 2:
            pass
        if number:
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            pass
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
        plugins = [
            "-p",
            "tests.processes",
            "-p",
            "tests.requirement_report",
            "-p",
            "tests.quiet",
            "-p",
            "tests.second_run",
        ]
        return pytester.runpytest_subprocess(*plugins, *options)

    return run


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_worst_end_of_a_test_counts(suite, pytester: pytest.Pytester, workers: str):
    suite(REQUIREMENTS, "--processes", workers).stdout.fnmatch_lines(
        ["requirements: 1 passed, 2 failed, * untested of *"]
    )
    results = json.loads((pytester.path / "build/requirements.json").read_text())
    file = "test_the_worst_end_of_a_test_counts.py"
    assert results == {
        "D1": {f"{file}::test_holds": {"passed": 2}},
        "D2": {f"{file}::test_breaks_at_the_end": {"failed": 1}},
        "DJ-2": {f"{file}::test_holds": {"passed": 2}, f"{file}::test_breaks": {"failed": 1}},
    }


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unknown_requirement_fails_the_collection(suite, workers: str):
    result = suite(
        "import pytest\n\n@pytest.mark.requirement('DJ-2', 'DJ-999')\ndef test_x(): pass\n", "--processes", workers
    )
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*'DJ-999' is in none of requirements.md, decisions.md*"])
    assert result.parseoutcomes().get("passed", 0) == 0


def test_quiet_tests_run_beside_each_other_only_and_those_marked_alone_beside_none(
    suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    result = suite(APART, "--processes", "2")
    result.assert_outcomes(passed=60)


def test_quiet_tests_start_after_all_other_tests(suite, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    suite(TURNS, "--processes", "2").assert_outcomes(passed=24)
    assert (tmp_path / "order").read_text().split() == ["busy"] * 12 + ["quiet"] * 12


def test_long_tests_come_first_quiet_ones_last_and_those_that_run_alone_after_them(suite):
    result = suite(FIRST, "--processes", "1", "-v")
    order = [line.partition("::")[2].strip() for line in result.outlines if "PASSED" in line and "::" in line]
    assert order == ["test_e", "test_b", "test_d", "test_a", "test_c", "test_alone"]


def test_process_that_dies_fails_its_test_and_is_replaced(suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    result = suite(DEATHS, "--processes", "2")
    result.assert_outcomes(passed=37, failed=3)
    result.stdout.fnmatch_lines(["The process that ran *::test_dies?17? has died."])
    assert (tmp_path / "imports").read_text() == "once ", "the tests are collected once for all processes"


def test_error_that_ends_a_process_is_told(suite):
    source = "import pytest\n\ndef test_ends(): pytest.exit('enough is enough')\n\ndef test_passes(): pass\n"
    result = suite(source, "--processes", "1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["The process that ran *::test_ends has died.", "*Exit: enough is enough"])


def test_no_test_begins_after_as_many_failures_as_are_allowed(suite):
    source = "import pytest\n\n@pytest.mark.parametrize('n', range(200))\ndef test_fails(n): assert False\n"
    result = suite(source, "--processes", "2", "--maxfail", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert 2 <= result.parseoutcomes()["failed"] <= 2 + 4 * OF_ONE_FILE_MAX


def test_interrupted_processes_end_what_they_have_started(suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUNNING", str(tmp_path))
    assert suite(INTERRUPTED, "--processes", "2").ret == pytest.ExitCode.INTERRUPTED
    assert len(list(tmp_path.glob("[0-9]*"))) == 2


def test_neighbours_stay_in_one_process_and_who_is_done_takes_over_half_of_what_is_left():
    shares = Shares([*"aaabbbccdd", *"xyz"], last=10, processes=2)
    assert shares.take(0) == [0, 1, 2]
    assert shares.take(1) == [5]
    assert shares.take(1) == [6, 7]
    shares.give_back(1, [7])
    assert shares.take(1) == [7]
    assert shares.take(0) == [3, 4]
    assert shares.take(0) == [9], "half of the only file that is left"
    assert [shares.take(process) for process in (0, 1, 1, 0, 1)] == [[8], [10], [11], [12], []]


@pytest.mark.parametrize("files,kept", [("aabbbbbc", "aa"), ("aaaaaaaa", "aaaa"), ("aaaaaabb", "aaaaaa")])
def test_whole_files_are_taken_over_where_there_are_several(files: str, kept: str):
    shares = Shares([*files, *files], last=16, processes=2)
    while shares.take(1)[-1] != 15:
        pass
    assert shares.take(1)[0] == len(kept)


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
    suite(SOMETIMES, "--processes", "2" if ends == 0 else "0")
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


def test_constants_that_another_process_remembered_are_what_hypothesis_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "src" / "program.py"
    program.parent.mkdir()
    program.write_text("NUMBER = 4711771\n")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    set_hypothesis_home_dir(tmp_path / "kept")
    try:
        remember_constants()
        (kept,) = (tmp_path / "kept").rglob("constants/*")
        kept.write_text(kept.read_text().replace("4711771", "4711772"))
        module = ModuleType("program")
        module.__file__ = str(program)
        assert list(constants_from_module(module)) == [4711772]
    finally:
        set_hypothesis_home_dir(None)
