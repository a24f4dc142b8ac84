"""Which bus the settings name, how it comes in, and what it says when they are wrong."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bus.wire.conftest import Heard, net_at, new_id, now, said, until
from tests.servers.certificates import Authority
from tests.servers.nats import NatsServer, running_nats
from trellis.app.wiring import SystemClock
from trellis.bus.errors import BusError, BusUnavailable
from trellis.bus.wire import BusOptions, open_bus
from trellis.bus.wire.cap import _module
from trellis.bus.wire.local import LocalBus
from trellis.engine.errors import SettingsInvalid


@pytest.fixture(scope="module")
def locked_server() -> Iterator[NatsServer]:
    with running_nats(settings='authorization { user: "ann", password: "s3cret" }') as server:
        yield server


async def test_the_default_is_a_bus_inside_the_process():
    bus = await open_bus(BusOptions(), clock=SystemClock(), now=now, new_id=new_id)
    assert isinstance(bus, LocalBus)
    assert (bus.url, bus.sender_id) == ("local", "trellis")
    await bus.close()


async def test_a_password_opens_the_server_and_is_never_shown(locked_server: NatsServer):
    async with net_at(locked_server.url.replace("//", "//ann:s3cret@")) as net:
        bus, subject, heard = await net.bus(), net.subject(), Heard()
        assert bus.connected
        assert bus.url == locked_server.url
        await bus.listen(subject, heard)
        await bus.publish(subject, said("in"), trace_id="t", needs_listener=True)
        await heard.until(1)


async def test_connection_without_the_password_fails_with_the_reason(locked_server: NatsServer):
    async with net_at(locked_server.url.replace("//", "//ann:wrong@")) as net:
        bus = await net.bus()
        assert not bus.connected
        with pytest.raises(BusUnavailable, match="Authorization Violation") as error:
            await bus.publish(net.subject(), said(""), trace_id="t")
        assert "wrong" not in str(error.value)


async def test_bus_connects_to_the_first_server_that_answers(plain_server: NatsServer):
    async with net_at(f"nats://127.0.0.1:1,{plain_server.url}") as net:
        bus = await net.bus()
        await until(lambda: bus.connected)
        await bus.publish(net.subject(), said(""), trace_id="t")


async def test_tls_is_checked_against_the_authority_that_is_given(tmp_path: Path):
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    certificate, key = ours.pair("server")
    with running_nats(settings=f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}') as server:
        url = server.url.replace("nats://", "tls://")
        async with net_at(url) as net:
            bus, subject, heard = await net.bus(ca_file=ours.file), net.subject(), Heard()
            assert bus.connected
            await bus.listen(subject, heard)
            await bus.publish(subject, said("in"), trace_id="t", needs_listener=True)
            await heard.until(1)
            for stranger in (await net.bus(), await net.bus(ca_file=other.file)):
                assert not stranger.connected
                with pytest.raises(BusUnavailable, match="certificate"):
                    await stranger.publish(subject, said(""), trace_id="t")


@pytest.mark.parametrize("url", ["nats", "http://host:1", "nats://", "nats://host:port", "nats://a:1,redis://b:2"])
async def test_an_address_that_is_none_is_named(url: str):
    with pytest.raises(SettingsInvalid, match="is no address like"):
        await open_bus(BusOptions(url=url), clock=SystemClock(), now=now, new_id=new_id)


async def test_an_error_about_a_wrong_bus_address_leaves_out_its_password():
    with pytest.raises(SettingsInvalid) as error:
        await open_bus(BusOptions(url="redis://ann:s3cret@h"), clock=SystemClock(), now=now, new_id=new_id)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("name", ["creds_file", "ca_file", "key_file", "keys_dir"])
async def test_files_that_are_not_there_are_named(tmp_path: Path, name: str):
    options = replace(BusOptions(url="nats://127.0.0.1:1"), **{name: tmp_path / "nowhere"})
    with pytest.raises(SettingsInvalid, match="nowhere"):
        await open_bus(options, clock=SystemClock(), now=now, new_id=new_id)


async def test_certificates_that_are_none_are_named(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nonsense")
    options = BusOptions(url="nats://127.0.0.1:1", ca_file=tmp_path / "ca.pem")
    with pytest.raises(SettingsInvalid, match="no certificates"):
        await open_bus(options, clock=SystemClock(), now=now, new_id=new_id)


async def test_a_durable_listener_needs_a_group(plain_server: NatsServer):
    async with net_at(plain_server.url) as net:
        bus = await net.bus()
        with pytest.raises(BusError, match="group"):
            await bus.listen(net.subject(), Heard(), durable=True)


@pytest.mark.parametrize("missing", ["nats.errors", "cap.validate"])
async def test_without_its_packages_the_bus_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str):
    _module.cache_clear()
    for ours in ("trellis.bus.wire.connection", "trellis.bus.wire.nats", "trellis.bus.wire.cap"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsInvalid, match=r"pip install 'trellis-engine\[bus\]'"):
        await open_bus(BusOptions(url="nats://127.0.0.1:1"), clock=SystemClock(), now=now, new_id=new_id)
