"""Every role of the platform as a process of its own, stopped with SIGTERM while jobs, queue jobs and runs flow."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.faults.platform import (
    BUS_WORKER,
    EVERYBODY,
    STOP_S,
    SUCCESS,
    WORKER,
    Platform,
    free_ports,
    loaded,
    until,
    write_files,
)
from tests.servers.nats import NatsServer, running_nats
from trellis.cli.up_process import GATEWAY


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with running_nats(jetstream=True) as server:
        yield server


@pytest.fixture
def platform(
    tmp_path: Path, new_postgres_database: Callable[..., str], postgres_template: str, nats: NatsServer
) -> Generator[Platform]:
    gateway, nlm, kernel = free_ports(3)
    environment = {
        **write_files(tmp_path),
        "TRELLIS_LEDGER": new_postgres_database(template=postgres_template),
        "TRELLIS_NLM_LEDGER": new_postgres_database(template=postgres_template),
        "TRELLIS_OBJECTS": f"file://{tmp_path / 'objects'}",
        "TRELLIS_MEMORY": str(tmp_path / "memory.git"),
        "TRELLIS_PORT": str(gateway),
        "TRELLIS_GATEWAY": f"http://127.0.0.1:{gateway}",
        "TRELLIS_NLM_PORT": str(nlm),
        "TRELLIS_NLM_BACKEND": f"http://127.0.0.1:{nlm}",
        "TRELLIS_SAFETY_PORT": str(kernel),
        "TRELLIS_POLICY": f"grpc://127.0.0.1:{kernel}",
        "TRELLIS_BUS": nats.url,
    }
    with Platform(tmp_path, environment) as made:
        yield made


@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_sigterm_of_every_role_under_load_loses_nothing_and_does_nothing_twice(
    platform: Platform, figures: Callable[..., None]
):
    everybody = [*EVERYBODY, WORKER, BUS_WORKER]
    for role in everybody:
        platform.start(role)
        if role == GATEWAY:  # it plants the agents
            await platform.ready(role)
    for role in everybody:
        await platform.ready(role)
    stopped: dict[str, tuple[int, float]] = {}
    async with loaded(platform) as load:
        async with load.flowing():
            await until(platform.effects, "work is done")
            for role in everybody:
                before = load.count
                stopped[role] = await platform.stop(role)
                platform.start(role)
                await platform.ready(role, times=2)
                await until(lambda before=before: load.count > before + 4, f"work goes on after {role} was stopped")
        ended = await load.all_ended(platform.logs)
        finalized = await load.finalized_artifacts()
    codes = {role: (code, round(took_s, 1)) for role, (code, took_s) in stopped.items() if code or took_s > STOP_S}
    assert codes == {}, platform.logs()
    counts = {kind: len(set(ids)) for kind, ids in load.acknowledged.items()}
    assert ended == {(kind, SUCCESS[kind]): n for kind, n in counts.items()}
    effects = platform.effects()
    assert set(effects) == {f"{kind}-{n}" for kind in ("plain", "bus") for n in range(counts[kind])}, "none is lost"
    assert set(effects.values()) == {1}, "nothing is done twice"
    assert finalized == dict.fromkeys(load.acknowledged["queue"], 1)
    assert platform.run("verify") == 0, platform.logs()
    slowest = max(stopped, key=lambda role: stopped[role][1])
    figures(stopped=len(stopped), **counts, slowest=slowest, slowest_s=round(stopped[slowest][1], 2))
