"""Which bus the settings name, how it comes in, and what it says when they are wrong."""

import ipaddress
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tests.bus.test_signatures import pem
from tests.bus.wire.conftest import Heard, net_at, new_id, now, said, until
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


def named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: str, signing: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """For this machine; whoever signs itself is an authority."""
    at, of_key = datetime.now(UTC), x509.SubjectKeyIdentifier.from_public_key
    machine = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(signer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - timedelta(days=1))
        .not_valid_after(at + timedelta(days=1))
        .add_extension(machine, critical=False)
        .add_extension(x509.BasicConstraints(ca=name == signer, path_length=None), critical=True)
        .add_extension(of_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )


@dataclass(frozen=True)
class Authority:
    """Signs certificates; the files lie in a folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def file(self) -> Path:
        return self._written(certificate(self.name, self.key, self.name, self.key), self.name)

    @property
    def server_settings(self) -> str:
        """Of a server with a certificate that this one signed."""
        key, key_file = ec.generate_private_key(ec.SECP256R1()), self.folder / "key.pem"
        key_file.write_bytes(pem(key))
        file = self._written(certificate("server", key, self.name, self.key), "server")
        return f'tls {{ cert_file: "{file}", key_file: "{key_file}" }}'

    def _written(self, made: x509.Certificate, name: str) -> Path:
        file = self.folder / f"{name}.pem"
        file.write_bytes(made.public_bytes(Encoding.PEM))
        return file


async def test_tls_is_checked_against_the_authority_that_is_given(tmp_path: Path):
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    with running_nats(settings=ours.server_settings) as server:
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
