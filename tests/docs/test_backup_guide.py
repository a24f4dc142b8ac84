"""docs/how-to/back-up.md does what it says."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, blocks, run
from tests.servers.postgres import PostgresServer, running_postgres

PAGE = ROOT / "docs" / "how-to" / "back-up.md"


@pytest.mark.prove
def test_the_guide_to_backups_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "no violation" in output
    assert "the backup is whole" in output
    assert "restored:" in output
    assert "report-3" in output
    assert [target for target in LINK.findall(PAGE.read_text()) if not (PAGE.parent / target).exists()] == []


@pytest.fixture
def roles(postgres_server: PostgresServer, new_postgres_database: Callable[..., str]) -> Iterator[Callable[..., str]]:
    """Makes a database with two more logins: `dumps` owns the ledger, `applies` owns the database."""
    database = ""

    def make(template: str) -> str:
        nonlocal database
        database = new_postgres_database(template=template).rpartition("/")[2]
        postgres_server.sql("create role dumps login in role trellis_owner")
        postgres_server.sql("create role applies login in role trellis_app")
        postgres_server.sql(f"alter database {database} owner to applies")
        return database

    yield make
    postgres_server.sql(f"alter database {database} owner to postgres")
    postgres_server.sql("drop role dumps, applies")


@pytest.mark.prove
def test_a_dump_is_restored_into_a_new_server_with_the_commands_of_the_guide(
    postgres_server: PostgresServer, postgres_template: str, roles: Callable[..., str], tmp_path: Path
):
    (commands,) = [text for language, text in blocks(PAGE) if language == "text"]
    name, programs = roles(postgres_template), postgres_server.binaries.bin_dir
    dump = [programs / "pg_dump", "--format=custom", "--file", tmp_path / "trellis.dump"]
    refused = subprocess.run([*dump, postgres_server.url(name, "applies")], capture_output=True, text=True, check=False)
    assert (refused.returncode, "permission denied" in refused.stderr) == (1, True), refused.stderr
    subprocess.run([*dump, postgres_server.url(name, "dumps")], check=True)
    with running_postgres(programs, fsync="off") as new_server:
        environment = {
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PGHOST": "127.0.0.1",
            "PGPORT": str(new_server.port),
            "PGUSER": "postgres",
        }
        subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=environment, check=True)
        stored = "select count(*) from trellis.transition"
        assert new_server.sql(stored, "trellis") == postgres_server.sql(stored, name)
        assert new_server.sql("set role trellis; select count(*) from trellis.job", "trellis") == "0"
