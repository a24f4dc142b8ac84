"""Signatures of packets: ECDSA on the curve P-256 with SHA-256, over the packet's deterministic bytes without its signature.

Own key: a PEM file with a private key. Keys of others: a folder with one public key per sender, `<sender id>.pem`. A key that is put
into the folder later is found when its sender is heard first.
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
    _known: dict[str, ec.EllipticCurvePublicKey] = field(default_factory=dict[str, ec.EllipticCurvePublicKey])
    _read_at: int = -1

    def __post_init__(self) -> None:
        self._trust_ourselves()

    def read(self) -> None:
        """Read the keys of others; raises OSError, SettingsInvalid."""
        if self.folder is not None:
            changed_at = self.folder.stat().st_mtime_ns
            self._known, self._read_at = _keys_in(self.folder), changed_at
            self._trust_ourselves()

    def sign(self, unsigned: bytes) -> bytes:
        """The signature, empty when we have no key."""
        return self.own.sign(unsigned, _HOW) if self.own else b""

    def fault(self, sender_id: str, unsigned: bytes, signature: bytes) -> ErrorCode | None:
        """What is wrong with the signature of a packet; None when nothing is, or nobody asks for it."""
        if not signature:
            return ErrorCode.SIGNATURE_MISSING if self.required else None
        if self._fits(sender_id, unsigned, signature):
            return None
        if self._read_again() and self._fits(sender_id, unsigned, signature):
            return None
        return ErrorCode.SIGNATURE_INVALID if self.required or sender_id in self._known else None

    def _fits(self, sender_id: str, unsigned: bytes, signature: bytes) -> bool:
        key = self._known.get(sender_id)
        if key is None:
            return False
        try:
            key.verify(signature, unsigned, _HOW)
        except InvalidSignature:
            return False
        return True

    def _read_again(self) -> bool:
        """Read the folder if it has changed since; True when it was read."""
        try:
            if self.folder is None or self.folder.stat().st_mtime_ns == self._read_at:
                return False
            self.read()
        except (OSError, SettingsInvalid):
            return False  # A folder that is being written is read at the next packet; until then the old keys count.
        return True

    def _trust_ourselves(self) -> None:
        if self.own is not None:
            self._known[self.sender_id] = self.own.public_key()


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


def _keys_in(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    files = sorted(folder.glob("*.pem"))
    if len(files) > KEYS_MAX:
        raise SettingsInvalid(source=str(folder), detail=f"has {len(files)} keys and the limit is {KEYS_MAX}")
    return {file.stem: _public_key(file) for file in files if _SENDER.fullmatch(file.stem)}


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
