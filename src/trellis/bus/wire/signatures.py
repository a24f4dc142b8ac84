"""Signatures of packets: ECDSA on the curve P-256 with SHA-256.

A signature covers the packet's deterministic bytes without the signature itself.

Our own key is a PEM file with a private key. Keys of others are in a folder with one public key per sender, `<sender
id>.pem`. A sender's file is checked with every packet that names the sender, so adding, replacing or removing it takes
effect at once. A sender whose key is there must sign.

The signature covers the packet's creation time. Our own packets also carry their subject (`audience`) and expiry, in
the envelope's `signature_metadata`, which the base profile of CAP's SDK does not use. A signed packet is refused if it
is old, was made for another subject, or was already received by this subscriber. A packet without that field (from an
SDK) is checked only for its time and for replay.
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
"""Profile name in `signature_metadata`; defines the meaning of its other fields."""
ALGORITHM = "ECDSA-P256-SHA256"
MESSAGE_ID_BYTES = 16
WINDOW_S_DEFAULT = 300.0
"""How far a signed packet's time may be from the time the bus took it, in seconds."""
SEEN_MAX = 100_000
"""Number of signed packets that a process remembers, to refuse replays."""
_SENDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,199}")
_SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDelivery:
    """How a packet reached one subscriber; its signature is checked against this."""

    subject: str
    at: datetime
    """When the bus took it: now, or when the stream stored it."""
    listener: int = 0
    """Number of the subscriber in this process. Each subscriber gets its own copy of a packet."""
    sequence: int | None = None
    """Its position in a stream. A redelivery has the same position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedPacket:
    """What a valid signature covers."""

    digest: bytes
    created_at: datetime
    audience: str | None
    """The subject that the packet was made for; None when it does not say."""
    expires_at: datetime | None


@dataclass(kw_only=True)
class PacketKeys:
    """Signs outgoing packets and verifies incoming ones."""

    sender_id: str = ""
    own: ec.EllipticCurvePrivateKey | None = None
    folder: Path | None = None
    required: bool = False
    """Whether every packet must be signed by a known sender. If not, only packets of known senders must be."""
    window_s: float = WINDOW_S_DEFAULT
    _known: dict[str, "_KnownKey"] = field(default_factory=dict[str, "_KnownKey"])
    _seen: LruCache[tuple[int, bytes], int | None] = field(default_factory=lambda: LruCache(SEEN_MAX))

    def read(self) -> None:
        """Read the keys of others, so that an invalid one is found at once; raises OSError, SettingsInvalid."""
        if self.folder is not None:
            self._known = _keys_in(self.folder)

    @property
    def known(self) -> int:
        """How many keys of others have been read."""
        return len(self._known)

    def sign(self, unsigned: bytes) -> bytes:
        """The signature; empty when we have no key."""
        return self.own.sign(unsigned, _SIGNATURE_ALGORITHM) if self.own else b""

    def must_sign(self, sender_id: str) -> bool:
        """Whether packets of this sender are accepted only with its signature."""
        return self.required or self._key_of(sender_id) is not None

    def fault(self, sender_id: str, unsigned: bytes, signature: bytes) -> ErrorCode | None:
        """What is wrong with a packet's signature; None when it is valid or not required."""
        if not self.must_sign(sender_id):
            return None
        if not signature:
            return ErrorCode.SIGNATURE_MISSING
        key = self._key_of(sender_id)
        return None if key is not None and _verifies(key, unsigned, signature) else ErrorCode.SIGNATURE_INVALID

    def misuse(self, signed: SignedPacket, delivery: PacketDelivery) -> str | None:
        """Why a packet with a valid signature is refused; None when it is accepted, and then remembered."""
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
        """The sender's current key; None without one.

        An unreadable key verifies nothing, and its sender must still sign.
        """
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
    """Stands for a key file that exists but cannot be read, or is being written."""


_UNUSABLE = _Unusable()


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownKey:
    """A key, and the version of its file."""

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
            source="TRELLIS_BUS",
            detail="packets must be signed, but there is no key to sign our own: set TRELLIS_BUS_KEY_FILE",
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
    folder.stat()  # a missing folder would look like one without keys
    files = sorted(folder.glob("*.pem"))
    if len(files) > KEYS_MAX:
        raise SettingsInvalid(source=str(folder), detail=f"has {len(files)} keys and the limit is {KEYS_MAX}")
    return {file.stem: _read_key(file) for file in files if _SENDER.fullmatch(file.stem)}


def _version(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read_key(file: Path) -> _KnownKey:
    """Read a key. The version is read first, so a key that changes meanwhile is read again and never kept outdated."""
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
