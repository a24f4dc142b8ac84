"""Certificate authorities of tests, and the certificates that they sign for this machine."""

import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


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

    def pair(self, name: str) -> tuple[Path, Path]:
        """A certificate that this one signed, and its key."""
        key, key_file = ec.generate_private_key(ec.SECP256R1()), self.folder / f"{name}-key.pem"
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return self._written(certificate(name, key, self.name, self.key), name), key_file

    def _written(self, made: x509.Certificate, name: str) -> Path:
        file = self.folder / f"{name}.pem"
        file.write_bytes(made.public_bytes(Encoding.PEM))
        return file
