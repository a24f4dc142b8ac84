"""Signatures of packets: ECDSA on the curve P-256 with SHA-256, over the packet's deterministic bytes without its signature.

Own key: a PEM file with a private key. Keys of others: a folder with one public key per sender, `<sender id>.pem`. A sender's file is
looked at with every packet that names it: what is put there, replaced or taken away counts at once. A sender whose key is there must sign.

What is signed says when the packet was made, and our own packets also say for which subject (`audience`) and until when, in the
envelope's `signature_metadata`, which the base profile of CAP's SDK leaves alone. A signed packet that is old, that was made for another
subject or that this listener had before is refused. A packet without that field (an SDK's) is held against its time and what came before.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trellis.bus.messages import ErrorCode
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.engine.private_files import read_private
from trellis.engine.recent_entries import LruCache

KEYS_MAX = 10_000
KEY_BYTES_MAX = 16_384
PROFILE = "trellis-bus-v1"
"""In `signature_metadata`: what its other fields mean."""
ALGORITHM = "ECDSA-P256-SHA256"
MESSAGE_ID_BYTES = 16
WINDOW_S_DEFAULT = 300.0
"""How far the time of a signed packet may be from the time at which the bus took it."""
SEEN_MAX = 100_000
"""Signed packets that a process remembers, so that it takes none of them twice."""
_SENDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,199}")
_SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDelivery:
    """How a packet reached one listener: what its signature is held against."""

    subject: str
    at: datetime
    """When the bus took it: now, or when the stream did that kept it."""
    listener: int = 0
    """Every listener of a process gets a packet of its own."""
    sequence: int | None = None
    """Its place in a stream: from the same place it comes again when nobody had come to an end with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedPacket:
    """What a good signature covers."""

    digest: bytes
    created_at: datetime
    audience: str | None
    """The subject that the packet was made for; None when it does not say."""
    expires_at: datetime | None


@dataclass(kw_only=True)
class PacketKeys:
    """Signs what we send and checks what comes in."""

    sender_id: str = ""
    own: ec.EllipticCurvePrivateKey | None = None
    folder: Path | None = None
    required: bool = False
    """Every packet must be signed by a sender whose key is known. Without it only packets of known senders must be."""
    window_s: float = WINDOW_S_DEFAULT
    _known: dict[str, "_KnownKey"] = field(default_factory=dict[str, "_KnownKey"])
    _seen: LruCache[tuple[int, bytes], int | None] = field(default_factory=lambda: LruCache(SEEN_MAX))

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
        return self.own.sign(unsigned, _SIGNATURE_ALGORITHM) if self.own else b""

    def must_sign(self, sender_id: str) -> bool:
        """Whether packets of this sender are taken only with its signature."""
        return self.required or self._key_of(sender_id) is not None

    def fault(self, sender_id: str, unsigned: bytes, signature: bytes) -> ErrorCode | None:
        """What is wrong with the signature of a packet; None when nothing is, or nobody asks for it."""
        if not self.must_sign(sender_id):
            return None
        if not signature:
            return ErrorCode.SIGNATURE_MISSING
        key = self._key_of(sender_id)
        return None if key is not None and _verifies(key, unsigned, signature) else ErrorCode.SIGNATURE_INVALID

    def misuse(self, signed: SignedPacket, delivery: PacketDelivery) -> str | None:
        """Why a packet with a good signature is refused here and now; None when it is not, and then it is remembered."""
        window, age = timedelta(seconds=self.window_s), delivery.at - signed.created_at
        if signed.audience is not None and signed.audience != delivery.subject:
            return f"it was signed for {signed.audience[:200]}"
        if abs(age) > window or (signed.expires_at is not None and signed.expires_at < delivery.at):
            apart = f"{abs(age.total_seconds()):.0f} s {'before' if age > timedelta() else 'after'}"
            return f"it was signed {apart} it came, and {self.window_s:g} s is the limit; compare the clocks"
        seen = (delivery.listener, signed.digest)
        if seen in self._seen and (delivery.sequence is None or self._seen[seen] != delivery.sequence):
            return "it was sent before"
        self._seen[seen] = delivery.sequence
        return None

    def _key_of(self, sender_id: str) -> "ec.EllipticCurvePublicKey | _Unusable | None":
        """The sender's key as it is now; None when there is none. One that cannot be read fits nothing, and its sender stays known."""
        if self.own is not None and sender_id == self.sender_id:
            return self.own.public_key()
        if self.folder is None or not _SENDER.fullmatch(sender_id):
            return None
        file, known = self.folder / f"{sender_id}.pem", self._known.get(sender_id)
        try:
            if known is None or known.version != _version(file):
                self._known[sender_id] = known = _read_key(file)
        except FileNotFoundError:
            self._known.pop(sender_id, None)
            return None
        except (OSError, SettingsInvalid):
            self._known.pop(sender_id, None)
            return _UNUSABLE
        return known.key


class _Unusable:
    """Stands for a key that is there and cannot be read, or is being written."""


_UNUSABLE = _Unusable()


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownKey:
    """A key as its file had it."""

    key: ec.EllipticCurvePublicKey
    version: tuple[int, int, int]


def _verifies(key: ec.EllipticCurvePublicKey | _Unusable, unsigned: bytes, signature: bytes) -> bool:
    if isinstance(key, _Unusable):
        return False
    try:
        key.verify(signature, unsigned, _SIGNATURE_ALGORITHM)
    except InvalidSignature:
        return False
    return True


def read_keys(
    *,
    sender_id: str,
    key_file: Path | None,
    keys_dir: Path | None,
    required: bool,
    window_s: float = WINDOW_S_DEFAULT,
) -> PacketKeys:
    """The keys of this process; raises SettingsInvalid."""
    if required and key_file is None:
        raise SettingsInvalid(
            source="bus", detail="packets must be signed, but there is no key to sign our own: set the bus's key file"
        )
    own = None if key_file is None else _own_key(key_file)
    keys = PacketKeys(sender_id=sender_id, own=own, folder=keys_dir, required=required, window_s=window_s)
    try:
        keys.read()
    except OSError as error:
        raise SettingsInvalid(source=str(keys_dir), detail=f"cannot be read: {error.strerror}") from error
    return keys


def _own_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(read_private(file), password=None)
    except KeyUnusable as error:
        raise SettingsInvalid(source=str(file), detail=str(error.data["reason"])) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsInvalid(source=str(file), detail="is no private key in PEM without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SettingsInvalid(source=str(file), detail="is no key on the curve P-256; make one for ECDSA with SHA-256")
    return key


def _keys_in(folder: Path) -> dict[str, _KnownKey]:
    folder.stat()  # a folder that is not there would look like one without keys
    files = sorted(folder.glob("*.pem"))
    if len(files) > KEYS_MAX:
        raise SettingsInvalid(source=str(folder), detail=f"has {len(files)} keys and the limit is {KEYS_MAX}")
    return {file.stem: _read_key(file) for file in files if _SENDER.fullmatch(file.stem)}


def _version(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_key(file: Path) -> _KnownKey:
    """What is read may be newer than the version that it is known by, and is read again then; never older."""
    version = _version(file)
    return _KnownKey(key=_public_key(file), version=version)


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
