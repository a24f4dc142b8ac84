"""Peers: which can be measured here, and what becomes of a run when one cannot or fails."""

from collections.abc import Callable
from pathlib import Path
from threading import get_ident

import pytest

from bench import commands, peers
from bench.groups import Figures, of_each
from bench.peers import PEERS, present, why_missing
from bench.processes import ChildFailed
from bench.subjects.pacing import many_threads


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets which modules of peers are installed."""

    def set_to(*modules: str) -> None:
        monkeypatch.setattr(peers, "find_spec", lambda name: object() if name in modules else None)

    return set_to


def test_absurd_is_left_out_with_what_to_do(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    installed()
    assert "absurd-sdk is not installed; `make bench` installs it" in (why_missing("peer_absurd") or "")
    installed("absurd_sdk")
    monkeypatch.delenv("ABSURD_SQL", raising=False)
    assert "set ABSURD_SQL to the file sql/absurd.sql" in (why_missing("peer_absurd") or "")
    monkeypatch.setenv("ABSURD_SQL", str(tmp_path / "absurd.sql"))
    assert "which is no file" in (why_missing("peer_absurd") or "")
    (tmp_path / "absurd.sql").touch()
    assert why_missing("peer_absurd") is None


def test_only_peers_that_are_here_are_measured(installed: Callable[..., None]):
    installed("huey")
    assert present("trellis", "peer_dbos", "peer_huey", "floor_postgres") == ["trellis", "peer_huey", "floor_postgres"]
    installed(*(peer.module for peer in PEERS.values()))
    assert "peer_dbos" in present("peer_dbos")


def test_a_peer_that_fails_costs_its_own_figure(installed: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    installed("huey", "dbos")

    def measure(subject: str) -> Figures:
        if subject == "peer_dbos":
            raise ChildFailed("no answer")
        return {subject: 1.0}

    assert list(of_each(("trellis", "peer_dbos", "peer_huey"), measure)) == [{"trellis": 1.0}, {"peer_huey": 1.0}]
    assert "DBOS failed and has no figure here: no answer" in capsys.readouterr().err


def test_ours_that_fails_ends_the_run():
    def measure(subject: str) -> Figures:
        raise ChildFailed(subject)

    with pytest.raises(ChildFailed):
        list(of_each(("trellis",), measure))


def test_a_command_that_fails_has_no_figure(monkeypatch: pytest.MonkeyPatch):
    assert commands.seconds("floor_python") > 0
    program, option, _ = commands.COMMANDS["floor_python"]
    monkeypatch.setitem(commands.COMMANDS, "floor_python", [program, option, "raise SystemExit('broken')"])
    with pytest.raises(ChildFailed, match="broken"):
        commands.seconds("floor_python")


def test_callers_that_block_make_their_connections_before_the_time_begins():
    threads: list[int] = []
    assert many_threads(lambda _: threads.append(get_ident()), 30, 3) > 0
    assert len(threads) == 30 + 3
    assert len(set(threads)) == 3, "each made a call, whoever was first to take the rest"


@pytest.mark.parametrize("calls", [0, 5])
def test_a_caller_that_fails_ends_the_measurement_with_its_reason(calls: int):
    left = iter(range(calls))

    def send(_: int) -> None:
        if next(left, None) is None:
            raise ConnectionError("no server")

    with pytest.raises(ConnectionError, match="no server"):
        many_threads(send, 10, 2)
