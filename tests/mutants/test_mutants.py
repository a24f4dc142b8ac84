"""Each requirement of five families has mutants: programs without its behaviour, on which a marked test must fail.

`make prove` runs each mutant. The default suite checks that the table still fits the program and the tests.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.changed_program import COPY, ENDS
from tests.mutants.mutant import ROOT, SOURCE, Mutant, is_there, marks, requirement_of
from tests.mutants.security import FINDINGS, SECURITY
from tests.mutants.table import FAMILIES, FIRST, MUTANTS, twin
from tests.mutants.wiring import WIRING
from tests.requirement_report import known_ids

RUN_TIME_MAX_S = 180
OUTPUT_SHOWN_MAX = 6_000

each_mutant = pytest.mark.parametrize("name", MUTANTS)
each_proof = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.requirement(requirement_of(name)), id=name) for name in MUTANTS]
)


def test_every_requirement_of_the_five_families_has_a_mutant() -> None:
    assert list(FIRST) == [name for name in known_ids() if name.partition("-")[0] in FAMILIES]
    assert {requirement_of(name) for name in MUTANTS.keys() - WIRING.keys()} == set(FIRST)


def test_every_mutant_of_sqlites_ledger_has_a_twin_of_postgresqls() -> None:
    of_sqlite = [name for name, mutant in MUTANTS.items() if mutant.file.startswith("ledgers/sqlite/")]
    assert of_sqlite
    without = [name for name in of_sqlite if twin(name) not in MUTANTS]
    assert without == []
    assert {MUTANTS[twin(name)].file.partition("/postgres/")[0] for name in of_sqlite} == {"ledgers"}


@each_mutant
def test_a_mutant_fits_the_program_and_its_tests(name: str) -> None:
    mutant, requirement = MUTANTS[name], requirement_of(name)
    assert mutant.applied() != (SOURCE / mutant.file).read_text(encoding="utf-8")
    if mutant.file.endswith(".py"):
        ast.parse(mutant.applied())
    assert mutant.tests
    assert {node: requirement in marks(node) for node in mutant.tests} == dict.fromkeys(mutant.tests, True)


@pytest.mark.prove
@pytest.mark.timeout(RUN_TIME_MAX_S + 60)
@each_proof
def test_a_program_without_the_behaviour_is_caught(name: str, tmp_path: Path) -> None:
    mutant, requirement = MUTANTS[name], requirement_of(name)
    ends, output = _run(mutant, tmp_path)
    caught = [end for end in ends if end["when"] == "call" and end["outcome"] == "failed" and end["noticed"]]
    assert caught, f"no test of {name} noticed:\n{output[-OUTPUT_SHOWN_MAX:]}"
    assert all(requirement in end["marks"] for end in ends)


def _run(mutant: Mutant, folder: Path) -> tuple[list[dict], str]:
    """How the mutant's tests ended on a copy of the program with its change, and what pytest wrote."""
    copy, ends = folder / "src", folder / "ends.jsonl"
    shutil.copytree(SOURCE, copy / "trellis")
    (copy / "trellis" / mutant.file).write_text(mutant.applied(), encoding="utf-8")
    ends.touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.mutants.changed_program",
    ]
    command += [
        f"--basetemp={folder / 'tests'}",
        f"--requirement-results={folder / 'requirements.json'}",
        *mutant.tests,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", COPY: str(copy), ENDS: str(ends)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_TIME_MAX_S, check=False
    )
    return [json.loads(line) for line in ends.read_text(encoding="utf-8").splitlines()], result.stdout + result.stderr


# --- the findings of the security review ------------------------------------------------------------------------------

each_guard = pytest.mark.parametrize("guard", SECURITY)


def test_every_high_and_medium_finding_has_a_mutant() -> None:
    assert {name.partition("-")[0] for name in SECURITY} == {*FINDINGS, "L"}


@each_guard
def test_a_guard_of_the_security_review_is_where_its_mutant_removes_it(guard: str) -> None:
    mutant = SECURITY[guard]
    if mutant.file.endswith(".py"):
        ast.parse(mutant.applied())
    assert mutant.applied() != (SOURCE / mutant.file).read_text(encoding="utf-8")
    assert mutant.tests
    assert {node: is_there(node) for node in mutant.tests} == dict.fromkeys(mutant.tests, True)


@pytest.mark.prove
@pytest.mark.timeout(RUN_TIME_MAX_S + 60)
@each_guard
def test_a_program_without_a_guard_of_the_security_review_is_caught(guard: str, tmp_path: Path) -> None:
    ends, output = _run(SECURITY[guard], tmp_path)
    caught = [end for end in ends if end["when"] == "call" and end["outcome"] == "failed" and end["noticed"]]
    assert caught, f"no reproduction of {guard} failed:\n{output[-OUTPUT_SHOWN_MAX:]}"
