"""`trellis health`: what a supervisor that runs a command learns about a process of its machine."""

import asyncio

import pytest

from trellis.cli import main
from trellis.engine.errors import LedgerUnavailable
from trellis.http_server.health import ProcessHealth, health_listener


async def well() -> None:
    pass


async def fails() -> None:
    raise LedgerUnavailable(reason="db.internal is down")


async def asked(*words: str) -> int:
    return await asyncio.to_thread(main, ["health", *words])


async def test_a_ready_process_is_exit_0_and_any_other_exit_1_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    health = ProcessHealth()
    async with health_listener("0.0.0.0:0", health) as url:
        assert url is not None
        monkeypatch.setenv("TRELLIS_HEALTH_ADDRESS", url.removeprefix("http://"))
        port = url.rpartition(":")[2]
        assert await asked() == 1
        assert f"127.0.0.1:{port} is not ready: it is starting" in " ".join(capsys.readouterr().err.split())
        health.needs(ledger=well)
        assert await asked() == 0
        assert capsys.readouterr().out == f"127.0.0.1:{port} is ready\n"
        health.needs(ledger=fails)
        assert await asked() == 1
        assert "ledger is UPSTREAM_UNAVAILABLE" in " ".join(capsys.readouterr().err.split())
        assert await asked("--live") == 0, "a process whose database is away must not be restarted"
        health.stopping()
        capsys.readouterr()
        assert await asked() == 1
        assert "it is stopping" in capsys.readouterr().err
        assert await asked("--live", "--json") == 0
        assert f'"address": "127.0.0.1:{port}"' in capsys.readouterr().out
    assert await asked() == 1
    assert "does not answer" in " ".join(capsys.readouterr().err.split())


async def test_what_is_no_process_of_trellis_is_not_ready(capsys: pytest.CaptureFixture[str]):
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await asked("--address", f"127.0.0.1:{port}") == 1
    assert "no process of Trellis" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", ":8430", "127.0.0.1:99999"])
def test_an_address_that_nobody_can_ask_is_a_mistake_of_the_caller(address: str, capsys: pytest.CaptureFixture[str]):
    assert main(["health", "--address", address]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_without_an_address_it_says_which_setting_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRELLIS_HEALTH_ADDRESS", raising=False)
    assert main(["health"]) == 2
    assert "TRELLIS_HEALTH_ADDRESS" in capsys.readouterr().err
