"""Where the subjects work: one private PostgreSQL server with a fresh database for each measurement, and SQLite files."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from bench.processes import ROOT, Checkout, ask
from bench.task import Task
from tests.servers.postgres import PostgresServer
from trellis.ledgers import migrate

APPLICATION = "bench_app"
MEMORY = Path("/dev/shm")
OURS = frozenset({"trellis", "workflows", "ledger", "runs", "gateway", "bus", "lists"})
"""Subjects that work on our own schema."""
MIGRATE = "import asyncio, sys; from trellis.ledgers import migrate; asyncio.run(migrate(sys.argv[1]))"
"""How another checkout makes its schema."""


@dataclass(slots=True)
class Stores:
    """The server, a folder on disk for files, and one in memory for handler marks."""

    server: PostgresServer
    folder: Path
    marks: Path
    checkout: Checkout | None = None
    """Where our subjects are measured; None is here."""
    _count: int = 0
    _templates: set[str] = field(default_factory=set)
    _kept: "dict[str, Database]" = field(default_factory=dict)
    _kept_files: dict[str, Path] = field(default_factory=dict)

    def database(self, subject: str) -> "Database":
        """A fresh, empty database with the subject's schema, copied from a template that is made once."""
        schema = "trellis" if subject in OURS else subject
        template = f"template_{schema}"
        if schema not in self._templates:
            self._make_template(schema, template)
            self._templates.add(schema)
        name = f"bench_{self._next()}"
        self.server.create_database(name, template)
        return Database(self.server, name)

    def kept(self, name: str, fill: "Callable[[Database], None]") -> "Database":
        """A database with our schema that is filled when it is first asked for and stays for the whole run."""
        if name not in self._kept:
            database = self.database("trellis")
            try:
                fill(database)
            except BaseException:
                database.drop()
                raise
            self._kept[name] = database
        return self._kept[name]

    def kept_file(self, name: str, fill: Callable[[Path], object]) -> Path:
        """`kept` for an SQLite file."""
        if name not in self._kept_files:
            path = self.file(name)
            fill(path)
            self._kept_files[name] = path
        return self._kept_files[name]

    def _make_template(self, schema: str, template: str) -> None:
        url = self.server.create_database(template)
        if schema == "trellis":
            self._migrate(url)
            if not self.server.sql(f"select 1 from pg_roles where rolname = '{APPLICATION}'"):
                self.server.sql(f"create role {APPLICATION} login in role trellis_app")
        else:
            ask(schema, "setup", Task(url=url).as_dict(), self.folder)

    def _migrate(self, url: str) -> None:
        if self.checkout is None:
            asyncio.run(migrate(url))
        else:
            subprocess.run([self.checkout.python, "-c", MIGRATE, url], check=True, cwd=self.checkout.root)

    def file(self, name: str) -> Path:
        """A path for a new SQLite file."""
        return self.folder / f"{name}-{self._next()}.db"

    def objects(self) -> Path:
        """A new folder for the object store of one measurement, on the disk that holds the SQLite files."""
        folder = self.folder / f"objects-{self._next()}"
        folder.mkdir()
        return folder

    def fresh_marks(self) -> Path:
        """An empty folder for the marks of one measurement."""
        folder = self.marks / str(self._next())
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Remove the templates and what was kept, for a server that lives on."""
        for database in self._kept.values():
            database.drop()
        for schema in self._templates:
            self.server.drop_database(f"template_{schema}")

    def _next(self) -> int:
        self._count += 1
        return self._count


@dataclass(frozen=True, slots=True)
class Database:
    """One database of the server."""

    server: PostgresServer
    name: str

    def url(self, subject: str) -> str:
        """Where the subject connects: ours as an application role, so that every guard is in force."""
        return self.server.url(self.name, APPLICATION if subject in OURS else "postgres")

    def run(self, *statements: str) -> Any:
        """Statements as superuser; returns the last one's first value."""
        return asyncio.run(self._run(statements))

    async def _run(self, statements: tuple[str, ...]) -> Any:
        connection = await asyncpg.connect(self.server.url(self.name))
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    def settle_down(self) -> None:
        """What autovacuum and the checkpointer would have done in a minute."""
        self.run("vacuum analyze", "checkpoint")

    def drop(self) -> None:
        """Remove it."""
        self.server.drop_database(self.name)


@contextlib.contextmanager
def open_stores(checkout: Checkout | None = None, **settings: str | int) -> Iterator[Stores]:
    """Everything for one run; all of it is gone afterwards. Files lie in the checkout, which is on a real disk."""
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / "build"))
    marks = Path(tempfile.mkdtemp(prefix="bench-", dir=MEMORY if MEMORY.is_dir() else folder))
    try:
        server = PostgresServer.start(None, None, **settings)
        try:
            yield Stores(server, folder, marks, checkout)
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(marks, ignore_errors=True)
