"""Many processes at once, and processes that die: nothing lost, nothing twice."""

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.servers.ready_python import ready_python
from tests.storage.memory.committer import committed
from tests.storage.memory.rig import AGENT, AT, address_of, append, apply, same_host
from trellis.storage.memory.layout import AlreadyApplied, DeepPart
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.verification import verify

ROOT = Path(__file__).resolve().parents[3]
SEED = 20_261_115


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts one of the programs beside this file; none of them outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def run(module: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [ready_python(), "-m", f"tests.storage.memory.{module}", *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=60)


def decisions(memory: MemoryRepository, agent: str) -> list[str]:
    items = memory.read_deep(agent, DeepPart.DECISIONS).items
    return [line.removeprefix("- ") for item in items for line in item.text.split("\n") if line.startswith("- ")]


@pytest.mark.requirement("D23", "PIPE-11")
@pytest.mark.parametrize("each", [6, pytest.param(50, marks=pytest.mark.prove)])
def test_eight_processes_lose_no_update_and_apply_none_twice(memory: MemoryRepository, start, sound, each: int):
    agents = [f"agent-{number}" for number in range(4)]
    processes = [start("committer", address_of(memory), f"w{number}", each, *agents) for number in range(8)]
    told = []
    for process in processes:
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
        told += [line.split() for line in out.splitlines()]
    assert len(told) == 8 * each
    assert Counter((agent, proposal) for agent, proposal, _, _ in told).most_common(1)[0][1] == 1
    for agent in agents:
        mine = sorted(int(version) for name, _, _, version in told if name == agent)
        assert mine == list(range(1, len(mine) + 1))
        assert memory.read(agent).version == len(mine)
        assert Counter(decisions(memory, agent)) == Counter(proposal for name, proposal, _, _ in told if name == agent)
        entries = memory.history(agent, limit=len(mine)).entries
        assert {entry.commit for entry in entries} == {commit for name, _, commit, _ in told if name == agent}
    assert verify(memory).commits == 8 * each
    sound()


@pytest.mark.requirement("D23", "PIPE-11")
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.prove)])
def test_killed_writers_lose_nothing_they_acknowledged(
    memory: MemoryRepository, memory_kind: str, start, sound, rounds: int
):
    """Three writers at once; each is killed at some moment after one of its acknowledgements, and the next round goes on.

    Those of a shared memory are three hosts that know nothing at first, and race for each change: fewer rounds do.
    """
    chance = random.Random(SEED)
    rounds = rounds if memory_kind == "local" else -(-rounds // 4)
    told: list[list[str]] = []
    for round_ in range(rounds):
        processes = [
            start("committer", address_of(memory), f"r{round_}w{number}", 10_000, AGENT, "other") for number in range(3)
        ]
        for process in processes:
            assert process.stdout
            told += [process.stdout.readline().split() for _ in range(chance.randint(1, 12))]
            process.kill()
            rest, error = process.communicate(timeout=60)
            assert not error
            told += [line.split() for line in rest.splitlines() if line.count(" ") == 3]
    there = {agent: Counter(decisions(memory, agent)) for agent in (AGENT, "other")}
    assert all(there[agent][proposal] == 1 for agent, proposal, _, _ in told)
    assert all(count == 1 for found in there.values() for count in found.values())
    assert {agent: memory.read(agent).version for agent in there} == {
        agent: found.total() for agent, found in there.items()
    }
    agent, proposal, commit, version = told[-1]
    again = apply(memory, append("decisions.md", f"- {proposal}"), proposal_id=proposal, agent_id=agent)
    assert again == AlreadyApplied(commit=commit, version=int(version))  # pyright: ignore[reportArgumentType]
    sound()


@pytest.mark.requirement("D23", "PIPE-11")
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.prove)])
def test_a_writer_killed_at_any_line_leaves_all_or_nothing(memory: MemoryRepository, start, sound, step: int):
    process = start("killed_at_every_line", same_host(memory), step)
    out, error = process.communicate(timeout=700 / step)
    assert process.returncode == 0, error
    seen = json.loads(out)
    assert seen["problems"] == []
    assert seen["killed"] > 250 / step
    assert seen["versions"] == seen["points"] == seen["applied"] + seen["not_applied"]
    assert seen["applied"] >= 2, "no kill came after the branch had moved"
    sound()


def test_threads_share_one_repository_object(memory: MemoryRepository, sound):
    with ThreadPoolExecutor(4) as threads:
        commits = [threads.submit(committed, memory, AGENT, f"prop_{number}", AT) for number in range(20)]
        versions = sorted(commit.result().version for commit in commits)
    assert versions == list(range(1, 21))
    assert Counter(decisions(memory, AGENT)) == Counter(f"prop_{number}" for number in range(20))
    sound()


def test_many_processes_make_one_repository(tmp_path, start):
    path = tmp_path / "folder" / "memory.git"
    processes = [start("committer", path, f"w{number}", 1, f"agent-{number}") for number in range(4)]
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    assert verify(open_memory(path, create=False)).commits == 4
    assert [entry.name for entry in path.parent.iterdir()] == ["memory.git"]
