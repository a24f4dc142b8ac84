"""The command line as a person calls it, on a fresh ledger of each kind."""

import asyncio
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.postgres import PostgresServer
from trellis import App, Context, PermanentError, ValidationError
from trellis.cli import main
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, Turn, TurnResult, TypeClaim
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import run_until_idle

LOGIN = "cli_login"
LEDGER = "ledger.db"


@dataclass(frozen=True)
class Answer:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output as JSON Lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        (record,) = self.records
        return record


class Terminal:
    """Calls the program in this process, with its ledger."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, stdin: bytes = b"", ledger: str | None = None) -> Answer:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capsys.readouterr()
        code = main([*arguments, "--ledger", ledger or self.url])
        out, err = self._capsys.readouterr()
        return Answer(code, out, err)

    def bare(self, *arguments: str) -> Answer:
        """Without naming a ledger."""
        self._capsys.readouterr()
        code = main(list(arguments))
        out, err = self._capsys.readouterr()
        return Answer(code, out, err)

    def submit(self, *arguments: str) -> str:
        """A submit that works; the id it prints."""
        answer = self("submit", *arguments)
        assert answer.code == 0, answer.err
        return answer.out.strip()


def stored_rows(terminal: Callable[..., Answer]) -> list[dict[str, Any]]:
    """All that the ledger stores as jobs: also the runs, proposals and so on, which `jobs` lists by their lifecycle alone."""
    others = (("--lifecycle", name) for name in ("run", "proposal", "artifact", "inbox-entry"))
    return [row for words in ((), *others) for row in terminal("jobs", *words, "--json").records]


@pytest.fixture(autouse=True)
def program_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed commands begin with `trellis`, as where it is installed, and not with a path of this machine."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `trellis migrate` leaves. Tests begin with a copy, which costs a tenth of what the command does."""
    folder = tmp_path_factory.mktemp("migrated")
    assert main(["migrate", "--ledger", f"sqlite:///{folder / LEDGER}"]) == 0
    assert {path.name for path in folder.iterdir()} == {LEDGER, f"{LEDGER}.key"}  # the write-ahead log is in the file
    return folder


@pytest.fixture
def sqlite_url(migrated: Path, tmp_path: Path) -> str:
    """A migrated SQLite ledger."""
    shutil.copytree(migrated, tmp_path, dirs_exist_ok=True)
    return f"sqlite:///{tmp_path / LEDGER}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A migrated ledger."""
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_url")
    server: PostgresServer = request.getfixturevalue("server_with_login")
    made: Callable[..., str] = request.getfixturevalue("new_postgres_database")
    name = made(template=request.getfixturevalue("postgres_template")).rpartition("/")[2]
    return server.url(name, LOGIN)


@pytest.fixture(scope="session")
def server_with_login(postgres_server: PostgresServer, postgres_template: str) -> PostgresServer:
    """The server with a login role that is only a member of the application role, as in production."""
    postgres_server.sql(f"CREATE ROLE {LOGIN} LOGIN IN ROLE trellis_app")
    return postgres_server


@pytest.fixture
def trellis(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    """The command line on a ledger of each kind."""
    monkeypatch.chdir(tmp_path)
    return Terminal(url, capsys, monkeypatch)


@pytest.fixture
def local(
    sqlite_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Terminal:
    """The command line in an empty folder, on an SQLite ledger that is already made."""
    monkeypatch.chdir(tmp_path)
    return Terminal(sqlite_url, capsys, monkeypatch)


def shop() -> App:
    """An application with one job type for each fate."""
    app = App(testing=True)

    @app.job("double")
    async def double(ctx: Context, number: int) -> int:
        ctx.logger.info("doubling", number=number)
        return 2 * number

    @app.job("refuse")
    async def refuse(ctx: Context) -> None:
        raise ValidationError("no such customer")

    @app.job("mutter")
    async def mutter(ctx: Context) -> None:
        raise ValidationError("expected [bold] or [/nothing]")

    @app.job("break")
    async def break_(ctx: Context) -> None:
        raise PermanentError("the shop is closed")

    return app


@pytest.fixture
def work() -> Callable[[str], None]:
    """Runs the shop's jobs until none is ready."""

    async def run(url: str) -> None:
        ledger = await open_ledger(url)
        try:
            await run_until_idle(shop(), ledger)
        finally:
            await ledger.close()

    return lambda url: asyncio.run(run(url))


@pytest.fixture
def held() -> Callable[[str], Callable[..., None]]:
    """Holds the job of type `double` that is ready; what it returns ends it: the holder obeys a soft cancel, or makes another step."""
    worker = Actor(role=Role.WORKER, name="worker-1")

    async def turn(url: str, turn: Turn) -> TurnResult:
        ledger = await open_ledger(url)
        try:
            return await ledger.turn(turn)
        finally:
            await ledger.close()

    def hold(url: str) -> Callable[..., None]:
        claim = Claim(claim_id=ClaimId("held"), types=(TypeClaim(type="double"),))
        (claimed,) = asyncio.run(turn(url, Turn(actor=worker, claim=claim))).claimed

        def end(trigger: str = "stop", cause: str | None = "it stopped") -> None:
            step = Advance(lease=claimed.lease, source="running", trigger=trigger, cause=cause)
            asyncio.run(turn(url, Turn(actor=worker, advances=(step,))))

        return end

    return hold
