"""Each requirement of five families has a mutant: a program without its behaviour, on which a marked test must fail.

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
from tests.mutants.mutant import ROOT, SOURCE, Mutant, is_there, marks
from tests.mutants.security import FINDINGS, SECURITY
from tests.mutants.table import FAMILIES, MUTANTS
from tests.requirement_report import known_ids

RUN_TIME_MAX_S = 180
OUTPUT_SHOWN_MAX = 6_000

each_mutant = pytest.mark.parametrize("requirement", MUTANTS)
each_proof = pytest.mark.parametrize(
    "requirement", [pytest.param(name, marks=pytest.mark.requirement(name), id=name) for name in MUTANTS]
)


def test_every_requirement_of_the_five_families_has_a_mutant() -> None:
    assert list(MUTANTS) == [name for name in known_ids() if name.partition("-")[0] in FAMILIES]


@each_mutant
def test_a_mutant_fits_the_program_and_its_tests(requirement: str) -> None:
    mutant = MUTANTS[requirement]
    assert mutant.applied() != (SOURCE / mutant.file).read_text(encoding="utf-8")
    if mutant.file.endswith(".py"):
        ast.parse(mutant.applied())
    assert mutant.tests
    assert {node: requirement in marks(node) for node in mutant.tests} == dict.fromkeys(mutant.tests, True)


@pytest.mark.prove
@pytest.mark.timeout(RUN_TIME_MAX_S + 60)
@each_proof
def test_a_program_without_the_behaviour_is_caught(requirement: str, tmp_path: Path) -> None:
    mutant = MUTANTS[requirement]
    ends, output = _run(mutant, tmp_path)
    caught = [end for end in ends if end["when"] == "call" and end["outcome"] == "failed" and end["noticed"]]
    assert caught, f"no test of {requirement} noticed:\n{output[-OUTPUT_SHOWN_MAX:]}"
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
