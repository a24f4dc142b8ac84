"""The server that the other tests rely on is a real, durable one, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers import known_types, warm_connections
from tests.servers.known_types import ASKED
from tests.servers.postgres import Contents, PostgresServer, available_servers, running_postgres, sharing_clusters
from tests.servers.warm_connections import WarmConnections

ROOT = Path(__file__).resolve().parent.parent


async def test_postgres_server_answers_on_tcp_and_socket_and_is_durable(postgres_server: PostgresServer):
    for url in (postgres_server.url(), postgres_server.url(socket=True)):
        connection = await asyncpg.connect(url)
        try:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                assert await connection.fetchval(f"SHOW {setting}") == "on"
        finally:
            await connection.close()


async def test_a_database_is_a_copy_of_its_template(postgres_server: PostgresServer, new_postgres_database):
    url = new_postgres_database()
    template = url.rpartition("/")[2]
    postgres_server.sql("CREATE TABLE kept AS SELECT 7 AS seven", template)
    copy = await asyncpg.connect(new_postgres_database(template=template))
    try:
        assert await copy.fetchval("SELECT seven FROM kept") == 7
    finally:
        await copy.close()


@pytest.mark.parametrize("binaries", available_servers(), ids=lambda binaries: binaries.name)
def test_committed_rows_survive_a_crash_of_the_server(binaries):
    with running_postgres(binaries.bin_dir) as server:
        server.sql("CREATE TABLE kept AS SELECT 7 AS seven")
        before = server.pid
        server.restart("immediate")
        assert server.pid != before
        assert server.sql("SELECT seven FROM kept") == "7"
        assert server.sql("SHOW server_version_num").startswith(str(binaries.version))


def test_contents_are_made_once_and_every_server_begins_with_a_copy_of_its_own():
    makers: list[PostgresServer] = []

    def fill(server: PostgresServer) -> None:
        makers.append(server)
        server.sql("CREATE TABLE kept AS SELECT 7 AS seven")
        server.sql("CREATE ROLE known LOGIN")

    contents = Contents(name="kept", fill=fill)
    with sharing_clusters(), running_postgres(contents=contents) as first:
        first.sql("UPDATE kept SET seven = 8")
        with running_postgres(contents=contents) as second, running_postgres() as empty:
            assert second.sql("SELECT seven FROM kept") == first.sql("SELECT seven - 1 FROM kept") == "7"
            assert second.sql("SELECT rolname FROM pg_roles WHERE rolname = 'known'") == "known"
            assert empty.sql("SELECT to_regclass('kept') IS NULL") == "t"
    assert len(makers) == 1
    assert not makers[0].folder.exists()


def test_postgres_server_ends_and_cleans_up_when_its_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, guard, folder = owner.stdout.readline().split()
    exits = [os.pidfd_open(int(pid)), os.pidfd_open(int(guard))]
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    for process in exits:
        assert _ends_within(process, timeout_s=20)
    assert not Path(folder).exists()


_OWNER = """
import sys
from tests.servers.postgres import PostgresServer
server = PostgresServer.start()
print(server.pid, server._guard.pid, server.folder, flush=True)
sys.stdin.read()
"""


def _ends_within(process_fd: int, *, timeout_s: float) -> bool:
    import select

    try:
        return bool(select.select([process_fd], [], [], timeout_s)[0])
    finally:
        os.close(process_fd)


async def test_a_server_is_asked_once_about_its_own_types_and_always_about_those_of_a_database(
    new_postgres_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[frozenset[int]] = []

    async def counted(connection: Any, typeoids: Any, timeout_s: float | None) -> Any:
        asked.append(frozenset(typeoids))
        return await ASKED(connection, typeoids, timeout_s)

    monkeypatch.setattr(known_types, "ASKED", counted)
    monkeypatch.setattr(known_types, "_known", {})
    url = new_postgres_database()
    for turn in range(2):
        connection = await asyncpg.connect(url)
        try:
            assert await connection.fetchval("select $1::bigint[]", [1, 2]) == [1, 2]
            if turn == 0:
                await connection.execute("create type mood as enum ('well')")
            assert await connection.fetchval("select array['well'::mood]") == ["well"]
        finally:
            await connection.close()
    assert [max(types) < known_types.FIRST_OWN_OID for types in asked] == [True, False, False]


async def test_kept_connections_are_used_again_and_those_unused_longest_are_closed(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warm_connections, "KEPT_OF_ALL_MAX", 3)
    warm, connections = WarmConnections(), dict[str, Any]()
    for kind in ("first", "second", "third", "first", "fourth", "fifth"):
        connection = await warm.connect(postgres_server.url(), server_settings={"application_name": kind})
        assert connections.setdefault(kind, connection) is connection
        await warm.close(connection)
    open_still = {kind for kind, connection in connections.items() if not connection.is_closed()}
    await warm.end()
    assert open_still == {"first", "fourth", "fifth"}
