"""The definition of the container image."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.deploy.shipped import DEPLOY, PINNED, ROOT, parsed
from trellis.app.settings import unknown_variables

DOCKERFILE = DEPLOY / "container" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def last(instruction: str) -> str:
    return [text for name, text in instructions() if name == instruction][-1]


def test_the_linter_of_dockerfiles_has_no_objection():
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_stands_on_a_pinned_one_and_runs_as_a_number_that_is_not_root():
    (given,) = [text for name, text in instructions() if name == "ARG"]
    assert PINNED.fullmatch(given.partition("=")[2])
    assert {text.split()[0] for name, text in instructions() if name == "FROM"} == {"${PYTHON_IMAGE}"}
    user, _, group = last("USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    after_user = [name for name, _ in instructions()][[name for name, _ in instructions()].index("USER") :]
    assert "RUN" not in after_user


def test_libraries_come_from_the_lock_by_hash():
    installs = [text for name, text in instructions() if name == "RUN" and "pip install" in text]
    for text in installs:
        for command in re.findall(r"pip install ([^&]*)", text):
            is_locked = "--require-hashes -r requirements/run.txt" in command
            assert is_locked or command.split() == ["--no-deps", "--no-build-isolation", "."]
    assert any("console.py build --strict" in text for name, text in instructions() if name == "RUN")


def test_what_is_copied_exists_and_is_not_left_out_of_the_build():
    ignored = (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [text.split() for name, text in instructions() if name == "COPY" and "--from" not in text]
    sources = {source.rstrip("/") for words in copied for source in words[:-1]}
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    assert ignored[[line for line in ignored if not line.startswith("#")].index("*") + 1] == "*"


def test_its_commands_and_variables_are_those_of_the_program():
    given = dict(word.split("=", 1) for word in last("ENV").split())
    assert unknown_variables(given) == []
    check = last("HEALTHCHECK")
    for words in (json.loads(check[check.index("[") :]), [*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))]):
        assert words[0] == "trellis"
        parsed(words[1], words[2:])
    assert given["TRELLIS_HEALTH_ADDRESS"].rpartition(":")[2] in last("EXPOSE").split()
