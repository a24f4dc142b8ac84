"""Signatures of packets: ECDSA on the curve P-256 with SHA-256, over the packet's deterministic bytes without its signature.

Own key: a PEM file with a private key. Keys of others: a folder with one public key per sender, `<sender id>.pem`. A sender's file is
looked at with every packet that it signed: what is put there, replaced or taken away counts at once.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trellis.bus.messages import ErrorCode
from trellis.engine.errors import SettingsInvalid

KEYS_MAX = 10_000
KEY_BYTES_MAX = 16_384
_SENDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,199}")
_HOW = ec.ECDSA(hashes.SHA256())


@dataclass(kw_only=True)
class Keys:
    """Signs what we send and checks what comes in."""

    sender_id: str = ""
    own: ec.EllipticCurvePrivateKey | None = None
    folder: Path | None = None
    required: bool = False
    """Every packet must be signed by a sender whose key is known. Without it only a signature of a known sender is checked."""
    _known: dict[str, "_Known"] = field(default_factory=dict[str, "_Known"])

    def read(self) -> None:
        """Read the keys of others, so that one that is none is found at once; raises OSError, SettingsInvalid."""
        if self.folder is not None:
            self._known = _keys_in(self.folder)

    @property
    def known(self) -> int:
        """How many keys of others have been read."""
        return len(self._known)

    def sign(self, unsigned: bytes) -> bytes:
        """The signature, empty when we have no key."""
        return self.own.sign(unsigned, _HOW) if self.own else b""

    def fault(self, sender_id: str, unsigned: bytes, signature: bytes) -> ErrorCode | None:
        """What is wrong with the signature of a packet; None when nothing is, or nobody asks for it."""
        if not signature:
            return ErrorCode.SIGNATURE_MISSING if self.required else None
        key = self._key_of(sender_id)
        if key is not None and _fits(key, unsigned, signature):
            return None
        return ErrorCode.SIGNATURE_INVALID if self.required or key is not None else None

    def _key_of(self, sender_id: str) -> ec.EllipticCurvePublicKey | None:
        """The sender's key as it is now; None when there is none, or it is being written."""
        if self.own is not None and sender_id == self.sender_id:
            return self.own.public_key()
        if self.folder is None or not _SENDER.fullmatch(sender_id):
            return None
        file, known = self.folder / f"{sender_id}.pem", self._known.get(sender_id)
        try:
            if known is None or known.version != _version(file):
                self._known[sender_id] = known = _read_key(file)
        except (OSError, SettingsInvalid):
            self._known.pop(sender_id, None)
            return None
        return known.key


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A key as its file had it."""

    key: ec.EllipticCurvePublicKey
    version: tuple[int, int, int]


def _fits(key: ec.EllipticCurvePublicKey, unsigned: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, unsigned, _HOW)
    except InvalidSignature:
        return False
    return True


def read_keys(*, sender_id: str, key_file: Path | None, keys_dir: Path | None, required: bool) -> Keys:
    """The keys of this process; raises SettingsInvalid."""
    if required and key_file is None:
        raise SettingsInvalid(
            source="bus", detail="packets must be signed, but there is no key to sign our own: set the bus's key file"
        )
    own = None if key_file is None else _own_key(key_file)
    keys = Keys(sender_id=sender_id, own=own, folder=keys_dir, required=required)
    try:
        keys.read()
    except OSError as error:
        raise SettingsInvalid(source=str(keys_dir), detail=f"cannot be read: {error.strerror}") from error
    return keys


def _own_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(_bytes(file), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsInvalid(source=str(file), detail="is no private key in PEM without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SettingsInvalid(source=str(file), detail="is no key on the curve P-256; make one for ECDSA with SHA-256")
    return key


def _keys_in(folder: Path) -> dict[str, _Known]:
    folder.stat()  # a folder that is not there would look like one without keys
    files = sorted(folder.glob("*.pem"))
    if len(files) > KEYS_MAX:
        raise SettingsInvalid(source=str(folder), detail=f"has {len(files)} keys and the limit is {KEYS_MAX}")
    return {file.stem: _read_key(file) for file in files if _SENDER.fullmatch(file.stem)}


def _version(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_key(file: Path) -> _Known:
    """What is read may be newer than the version that it is known by, and is read again then; never older."""
    version = _version(file)
    return _Known(key=_public_key(file), version=version)


def _public_key(file: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(_bytes(file))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsInvalid(source=str(file), detail="is no public key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SettingsInvalid(source=str(file), detail="is no key on the curve P-256")
    return key


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(KEY_BYTES_MAX)
    except OSError as error:
        raise SettingsInvalid(source=str(file), detail=f"cannot be read: {error.strerror}") from error
