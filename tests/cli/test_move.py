"""`trellis move`: an embedded instance goes to PostgreSQL and S3, whatever happens on the way."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from tests.cli.conftest import Answer, Terminal
from tests.cli.moving import fill, paced_jobs_claimed, records, seal
from tests.servers.postgres import PostgresServer
from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.storage.conftest import CREDENTIALS, seaweedfs
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.engine.extras import program_version
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.ledgers import open_ledger
from trellis.ledgers.moving import target
from trellis.ledgers.moving.source import MoveRefused, only_move, read_mark
from trellis.ledgers.moving.target import public_address
from trellis.lifecycles import Role
from trellis.operations import move as operation
from trellis.operations.backup import InstancePlaces
from trellis.operations.move import InstanceMove, MoveDecided, MoveDiffers, MoveTargets, MoveUnverified
from trellis.storage.objects.open import open_objects

__all__ = ["seaweedfs"]
SUBMITTER = Actor(role=Role.SUBMITTER, name="anna")
NLM = Actor(role=Role.NLM_BACKEND, name="backend")
VIOLIN = "archivist-violin"
_numbers = iter(range(1, 1_000_000))


class Fleet:
    """Where an instance is moved to, and the command that does it."""

    def __init__(self, terminal: Terminal, folder: Path, ledger: str, nlm_ledger: str | None, objects: str) -> None:
        self.terminal, self.folder, self.ledger, self.nlm_ledger, self.objects = (
            terminal,
            folder,
            ledger,
            nlm_ledger,
            objects,
        )
        self.memory = folder / "fleet" / "memory.git"

    @property
    def options(self) -> tuple[str, ...]:
        nlm = ("--to-nlm-ledger", self.nlm_ledger) if self.nlm_ledger else ()
        return ("--to-ledger", self.ledger, "--to-objects", self.objects, "--to-memory", str(self.memory), *nlm)

    def move(self, *options: str) -> Answer:
        return self.terminal("move", *self.options, *options)

    def moving(self, on_phase: Callable[[str], None]) -> InstanceMove:
        """The command in this process, which may be stopped after any phase."""
        return InstanceMove(
            places=InstancePlaces(
                ledger=self.folder / "ledger.db",
                nlm_ledger=self.folder / "nlm.db",
                objects=self.folder / "objects",
                memory=self.folder / "memory.git",
            ),
            targets=MoveTargets(
                ledger=self.ledger, objects=self.objects, memory=self.memory, nlm_ledger=self.nlm_ledger
            ),
            actor=Actor(role=Role.CONTROL_PLANE, name="anna@here"),
            version="1",
            credentials=CREDENTIALS,
            on_phase=on_phase,
        )


@pytest.fixture
def fleet(
    local: Terminal,
    tmp_path: Path,
    seaweedfs: SeaweedServer,
    new_postgres_database: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Fleet:
    """Empty databases and an empty prefix for the instance in the working folder."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    ledger = new_postgres_database().replace("postgres@", "postgres:h%40sh@")
    objects = seaweedfs.url(f"moved-{next(_numbers)}")
    return Fleet(local, tmp_path, ledger, None, objects)


@pytest.fixture
def whole(local: Terminal, fleet: Fleet, new_postgres_database: Callable[..., str]) -> Fleet:
    """An instance with one of everything: agents, a run with proposals, memory, jobs, an NLM ledger, a sealed chain."""

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    assert local("run", VIOLIN, "--watch").code == 0
    asyncio.run(fill(local.url, fleet.folder / "nlm.db"))
    asyncio.run(seal(local.url))
    fleet.nlm_ledger = new_postgres_database()
    return fleet


def files(folder: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if ".trellis/" not in name and ".lock" not in name}


@pytest.mark.requirement("PIPE-2", "D32")
def test_an_instance_with_one_of_everything_arrives_whole_and_goes_on(whole: Fleet, monkeypatch: pytest.MonkeyPatch):
    before, memory = asyncio.run(records(whole.terminal.url)), files(whole.folder / "memory.git")
    keys = whole.folder / "fleet.key"
    answer = whole.move("--json", "--to-keys", str(keys), "--reason", "we grow")
    assert answer.code == 0, answer.err
    assert "h%40sh" not in answer.out + answer.err
    report = answer.record
    assert {part for part, rows in report["rows"].items() if not rows} == set(), "the instance has one of everything"
    after = asyncio.run(records(whole.ledger))
    for what, value in before.items():
        assert after[what] == value, what
    assert files(whole.memory) == memory
    assert keys.read_bytes() == (whole.folder / "ledger.db.key").read_bytes()
    for name, value in report["settings"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRELLIS_LEDGER", whole.ledger)

    def there(*arguments: str) -> Answer:
        return whole.terminal.bare(*arguments)

    assert there("verify").code == 0
    assert asyncio.run(paced_jobs_claimed(whole.ledger)) == 1, "the used token of the key is still used"
    assert there("audit", "verify", "--json").code == 0
    assert there("run", VIOLIN, "--watch").code == 0, "work goes on"
    settings = {"objects": whole.objects, "memory": str(whole.memory)}
    asyncio.run(seal(whole.ledger, Settings.model_validate(settings)))
    sealed = there("audit", "verify", "--json")
    assert sealed.code == 0, sealed.out
    # All that came from the old ledger is sealed once more. The three events of NLM jobs wait for their backend.
    assert sealed.record["unsealed"] == 3
    assert whole.terminal("verify").code == 0, "the source can still be read"
    assert (whole.folder / "objects").is_dir()


def test_configured_keys_stay_in_force(small: Fleet, monkeypatch: pytest.MonkeyPatch):
    for name in ("TOKEN_KEY_FILE", "CALLBACK_KEY_FILE"):
        file = small.folder / name.lower()
        file.write_text("ab" * 32)
        file.chmod(0o600)
        monkeypatch.setenv(f"TRELLIS_{name}", str(file))
    settings = small.move("--json").record["settings"]
    assert settings["TRELLIS_TOKEN_KEY_FILE"] == str(small.folder / "token_key_file")
    assert settings["TRELLIS_CALLBACK_KEY_FILE"] == str(small.folder / "callback_key_file")


@pytest.mark.requirement("PIPE-4")
def test_memory_in_the_object_store_moves_with_the_objects(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_MEMORY", "objects")

    async def plant(url: str) -> None:
        async with open_instance(Settings.model_validate({"memory": "objects"}), url) as instance:
            await instance.plant()

    asyncio.run(plant(fleet.terminal.url))
    before = fleet.terminal("memory", "history", VIOLIN, "--json").record
    refused = fleet.move("--json")
    assert "leave --to-memory out" in refused.err
    answer = fleet.terminal("move", "--to-ledger", fleet.ledger, "--to-objects", fleet.objects, "--json")
    assert answer.code == 0, answer.err
    assert answer.record["settings"]["TRELLIS_MEMORY"] == "objects"
    for name, value in answer.record["settings"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRELLIS_LEDGER", fleet.ledger)
    assert fleet.terminal.bare("memory", "history", VIOLIN, "--json").record == before
    assert fleet.terminal.bare("run", VIOLIN, "--watch").code == 0, "work goes on, with its memory"
    assert fleet.terminal.bare("verify").code == 0


# --- what goes wrong on the way --------------------------------------------------------------------------------------


class Stopped(Exception):
    """The process ends here."""


@pytest.fixture
def small(local: Terminal, fleet: Fleet, new_postgres_database: Callable[..., str]) -> Fleet:
    """An instance with some jobs, an NLM ledger, objects and memory."""

    async def make() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.objects.put("a/one.json", b"1")
            await instance.objects.put("b/two.json", "скрипка".encode())
            await instance.ledger.submit(SUBMITTER, [NewJob(job_id=JobId(f"j{n}"), type="t") for n in range(5)])
        other = await open_ledger(f"sqlite:///{fleet.folder / 'nlm.db'}")
        await other.submit(NLM, [NewJob(job_id=JobId("n1@x"), type="t", lifecycle="nlm-job")])
        await other.close()

    asyncio.run(make())
    fleet.nlm_ledger = new_postgres_database()
    return fleet


def stop_at(phase: str) -> Callable[[str], None]:
    def stop(ended: str) -> None:
        if ended == phase:
            raise Stopped

    return stop


PHASES = (
    *("check", "closed ledger.db", "closed nlm.db", "close", "prepare", "copy objects", "copy memory", "copy rows"),
    *("verify", "open", "opened"),
)


@pytest.mark.requirement("PIPE-2")
def test_a_move_that_is_stopped_after_any_phase_goes_on(small: Fleet):
    before = asyncio.run(records(small.terminal.url))
    reached: list[str] = []
    for phase in PHASES:
        moving = small.moving(stop_at(phase))
        with pytest.raises(Stopped):
            asyncio.run(moving.run())
    report = asyncio.run(small.moving(reached.append).run())
    assert report.state == "moved"
    assert "copy rows" not in reached, "what is open is not copied again"
    assert asyncio.run(records(small.ledger)) == before
    assert asyncio.run(objects_of(small)) == {
        key: body for key, body in files(small.folder / "objects").items() if not key.startswith("trellis-probe")
    }
    assert files(small.memory) == files(small.folder / "memory.git")
    assert asyncio.run(small.moving(reached.append).run()).state == "moved", "and once more changes nothing"


async def objects_of(fleet: Fleet) -> dict[str, bytes]:
    store = await open_objects(fleet.objects, credentials=CREDENTIALS)
    try:
        page = await store.list("")
        return {info.key: stored.body for info in page.items if (stored := await store.get(info.key)) is not None}
    finally:
        await store.close()


@pytest.mark.parametrize("phase", ["closed ledger.db", "verify"])
def test_an_undone_move_leaves_no_trace_and_can_be_made_again(small: Fleet, phase: str):
    before = asyncio.run(records(small.terminal.url))
    with pytest.raises(Stopped):
        asyncio.run(small.moving(stop_at(phase)).run())
    assert "This ledger is closed" in small.terminal("submit", "t").err
    for undo_phase in ("undo decided", "undo cleared"):
        with pytest.raises(Stopped):
            asyncio.run(small.moving(stop_at(undo_phase)).undo())
    assert asyncio.run(small.moving(lambda _: None).undo()).state == "undone"
    after = asyncio.run(records(small.terminal.url))
    assert [act.event for act in after.pop("acts")] == ["ledger.migrated", "instance.move_undone"]
    assert after == {what: value for what, value in before.items() if what != "acts"}
    assert asyncio.run(objects_of(small)) == {}
    assert not small.memory.exists()
    assert small.terminal("submit", "t").code == 0
    asyncio.run(small.moving(lambda _: None).run())
    assert len(asyncio.run(records(small.ledger))["jobs"]) == len(before["jobs"]) + 1


def test_finished_move_is_not_undone_where_its_address_leads_to_an_empty_database(
    small: Fleet, new_postgres_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    assert small.move().code == 0
    empty = new_postgres_database().rpartition("/")[2]
    moved = small.ledger.rpartition("/")[2]
    monkeypatch.setattr(target, "public_address", lambda url: public_address(url).replace(empty, moved))
    monkeypatch.setattr(operation, "public_address", lambda url: public_address(url).replace(empty, moved))
    small.ledger = small.ledger.replace(moved, empty)
    refused = small.move("--undo")
    assert refused.code != 0
    assert "it works there" in refused.err
    assert read_mark(small.terminal.url) is not None, "the source stays closed"


def test_an_open_instance_is_not_undone(small: Fleet):
    with pytest.raises(Stopped):
        asyncio.run(small.moving(stop_at("open")).run())  # and the source does not know yet
    with pytest.raises(MoveDecided, match="the instance is open at postgresql://postgres@"):
        asyncio.run(small.moving(lambda _: None).undo())
    assert "This ledger is closed" in small.terminal("submit", "t").err
    (small.memory / "objects" / "new").write_text("the new instance has begun to work")
    asyncio.run(put_object(small, "c/three.json", b"3"))
    assert asyncio.run(small.moving(lambda _: None).run()).state == "moved"
    answer = small.terminal("submit", "t", ledger=str(small.nlm_ledger))
    assert answer.code == 0, "the other ledger is open too"


@pytest.mark.parametrize(
    "statement, difference",
    [
        ("delete from trellis.ready where id = 2", "jobs: 5 rows here and 4 there"),
        (None, "object a/one.json differs"),
    ],
)
def test_a_copy_that_differs_is_not_opened(
    small: Fleet, postgres_server: PostgresServer, statement: str | None, difference: str
):
    def tamper(ended: str) -> None:
        if ended != "copy rows":
            return
        if statement is None:
            asyncio.run_coroutine_threadsafe(put(), asyncio.get_running_loop())
            return
        name = small.ledger.rpartition("/")[2]
        row = postgres_server.sql("select value::jsonb ->> 'id' from trellis.meta where name = 'move'", name).strip()
        postgres_server.sql(f"begin; set local trellis.move = '{row}'; {statement}; commit", name)

    async def put() -> None:
        store = await open_objects(small.objects, credentials=CREDENTIALS)
        await store.put("a/one.json", b"2")
        await store.close()

    with pytest.raises(MoveDiffers, match=difference):
        asyncio.run(small.moving(tamper).run())
    answer = small.terminal("submit", "t", ledger=small.ledger)
    assert "is not open yet" in answer.err


def test_a_database_that_goes_away_while_the_copy_is_compared_is_no_difference(
    small: Fleet, postgres_server: PostgresServer
):
    def cut(ended: str) -> None:
        if ended == "copy rows":
            name = small.ledger.rpartition("/")[2]
            postgres_server.sql(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")

    with pytest.raises(MoveUnverified, match="could not be verified"):
        asyncio.run(small.moving(cut).run())
    assert asyncio.run(small.moving(lambda _: None).run()).state == "moved"


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(small: Fleet, postgres_server: PostgresServer):
    answer = small.move("--dry-run")
    assert answer.code == 0, answer.err
    assert "the move is possible" in answer.out
    assert small.terminal("submit", "t").code == 0
    assert postgres_server.sql("select to_regclass('trellis.meta')", small.ledger.rpartition("/")[2]).strip() == ""
    assert asyncio.run(objects_of(small)) == {}
    assert not small.memory.exists()


def test_a_move_goes_on_only_to_where_it_began(small: Fleet, new_postgres_database: Callable[..., str]):
    version = program_version()
    with pytest.raises(Stopped):
        asyncio.run(replace(small.moving(stop_at("prepare")), version=version).run())
    first, elsewhere = small.ledger, new_postgres_database()
    for wrong in ("ledger", "objects"):
        kept = getattr(small, wrong)
        setattr(
            small,
            wrong,
            elsewhere
            if wrong == "ledger"
            else f"{small.objects.partition('?')[0]}-b?{small.objects.partition('?')[2]}",
        )
        for option in ((), ("--undo",)):
            answer = small.move(*option)
            assert answer.code != 0
            assert f"it was begun with `--to-ledger {first.replace(':h%40sh', '')}" in answer.err
        setattr(small, wrong, kept)
    assert small.move().code == 0


def test_what_cannot_be_moved_is_refused_before_anything_is_closed(
    small: Fleet, new_postgres_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    def refused(*options: str) -> str:
        answer = small.terminal("move", *options)
        assert answer.code != 0
        assert "h%40sh" not in answer.out + answer.err
        assert small.terminal("submit", "t").code == 0, "it is open"
        return answer.err

    ledger, objects = ("--to-ledger", small.ledger), ("--to-objects", small.objects)
    memory, nlm = ("--to-memory", str(small.memory)), ("--to-nlm-ledger", str(small.nlm_ledger))
    assert "name a second database with --to-nlm-ledger" in refused(*ledger, *objects, *memory)
    assert "name its new folder with --to-memory" in refused(*ledger, *objects, *nlm)
    assert "each ledger needs its own" in refused(*ledger, *objects, *memory, "--to-nlm-ledger", small.ledger)
    assert "which stays as it is" in refused(*ledger, *objects, *nlm, "--to-memory", str(small.folder / "memory.git"))
    assert "--to-objects is s3://" in refused(*ledger, *nlm, *memory, "--to-objects", f"file://{small.folder}/x")
    assert "--to-ledger is postgresql://" in refused("--to-ledger", "sqlite:///x.db", *objects, *memory, *nlm)
    wrong = ("--to-ledger", "postgresql://anna:h%40sh@127.0.0.1:1/x")
    assert "nothing listens at 127.0.0.1" in refused(*wrong, *objects, *memory, *nlm)
    asyncio.run(put_object(small, "theirs", b"x"))
    assert "has objects; name an empty prefix" in refused(*ledger, *objects, *memory, *nlm)
    database = apsw.Connection(str(small.folder / "ledger.db"))
    (guard,) = database.execute("SELECT sql FROM sqlite_schema WHERE name = 'trellis_event_never_changes'").fetchall()[
        0
    ]
    database.execute("DROP TRIGGER trellis_event_never_changes; UPDATE trellis_event SET version = 2 WHERE job = 1")
    fresh = ("--to-objects", small.objects.replace("moved-", "other-"))
    assert "` finds 1 violations, such as of job j0" in refused(*ledger, *fresh, *memory, *nlm)
    database.execute("UPDATE trellis_event SET version = 1 WHERE job = 1")
    database.execute(str(guard))
    database.close()
    small.memory.mkdir(parents=True)
    (small.memory / "file").write_text("theirs")
    assert "exists and is no copy of this memory" in refused(*ledger, *fresh, *memory, *nlm)


async def put_object(fleet: Fleet, key: str, body: bytes) -> None:
    store = await open_objects(fleet.objects, credentials=CREDENTIALS)
    await store.put(key, body)
    await store.close()


def test_an_instance_that_somebody_serves_is_not_moved(small: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.ledgers.sqlite.connection.BUSY_TIMEOUT_S", 0.1)

    async def beside() -> None:
        serving = await open_ledger(small.terminal.url)
        try:
            with pytest.raises(MoveRefused, match=r"another process has .*ledger\.db open"):
                await small.moving(lambda _: None).run()
            await serving.submit(SUBMITTER, [NewJob(job_id=JobId("still"), type="t")])
        finally:
            await serving.close()

    asyncio.run(beside())
    assert read_mark(small.terminal.url) is None


def test_two_moves_at_once_are_refused(small: Fleet):
    with only_move(small.folder / "ledger.db"):
        answer = small.move()
    assert "another move works on" in answer.err


def test_a_closed_instance_does_not_serve_and_its_backup_is_closed_too(
    small: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(Stopped):
        asyncio.run(small.moving(stop_at("close")).run())
    monkeypatch.setenv("TRELLIS_GATEWAY", "http://127.0.0.1:9")
    for command in (("up",), ("up", "--roles", "nlm")):
        answer = small.terminal(*command)
        assert answer.code != 0
        assert "This ledger is closed" in answer.err
    monkeypatch.delenv("TRELLIS_GATEWAY")
    doctor = small.terminal("doctor").out
    assert "this ledger is closed" in doctor.replace("\n", " ")
    assert small.terminal("backup", str(tmp_path / "b.tar")).code == 0
    restored = f"sqlite:///{tmp_path / 'again' / 'trellis.db'}"
    answer = small.terminal("restore", str(tmp_path / "b.tar"), ledger=restored)
    assert answer.code == 0, answer.err
    assert "it is closed, as it was when it was saved" in answer.err
    assert read_mark(restored) == read_mark(small.terminal.url)
    assert "This ledger is closed" in small.terminal("submit", "t", ledger=restored).err
