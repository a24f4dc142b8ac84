"""A server on this machine that writes down who came, with a certificate for a name that only the test resolves."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.stopped_tasks import stopped

NAME = "api.example.test"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


@dataclass
class Certificates:
    """A private authority and the certificate of one name, as files."""

    authority: Path
    chain: Path
    key: Path

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.chain, self.key)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority))


def make_certificates(folder: Path, *names: str) -> Certificates:
    """A certificate that signs itself, for these names and addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "certificate.pem", folder / "private.pem"
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    return Certificates(authority=pem, chain=pem, key=private)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass
class Listener:
    """What came: connections are counted before a byte is read."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list[bytes])
    names: list[str | None] = field(default_factory=list[str | None])
    """What each TLS client called us."""


@asynccontextmanager
async def listening(
    host: str = "127.0.0.1",
    *,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    answer: bytes = OK,
    hold: Callable[[], asyncio.Event] | None = None,
) -> AsyncGenerator[Listener]:
    """A server that answers every request with these bytes, or holds it until the event."""
    listener, open_writers = Listener(), set[asyncio.StreamWriter]()
    gate = hold() if hold else None
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: listener.names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        try:
            listener.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if gate is not None:
                await gate.wait()
            writer.write(answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            open_writers.discard(writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listener.connections += 1
        handlers.append(asyncio.ensure_future(serve(reader, writer)))

    handlers: list[asyncio.Future[None]] = []
    server = await asyncio.start_server(connected, host, port, ssl=tls)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        for writer in list(open_writers):
            writer.transport.abort()
        for handler in handlers:
            handler.cancel()
        await stopped(*handlers, but=(OSError, EOFError))
