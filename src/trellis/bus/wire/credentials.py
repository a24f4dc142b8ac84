"""How we come in to a NATS server that asks for keys: a credentials file (a user's JWT and the seed of its key), or the seed alone (an nkey).

The file is read with every connection that is made, so one that is replaced counts from the next on. The seed stays here: the server gets a
signature of what it asks for. (nats-py 2.16 still reads these files in a loop that never ends on one
that has no JWT, and needs the package nkeys: that is why this module is here. Look again when nats-py is raised.)
"""

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nats.aio.client import Client
from nats.errors import Error as NatsError

from trellis.engine.errors import SettingsInvalid

FILE_BYTES_MAX = 64 * 1024
JWT, SEED = "NATS USER JWT", "USER NKEY SEED"
"""What the two parts of a credentials file are called."""
_USER = 20 << 3
_SEED = 18 << 3
"""The kinds of keys, as they stand before the key itself: they make a user's begin with U, and its seed with SU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Who we are for the server."""

    public: str
    """The user's public key."""
    jwt: str | None = field(repr=False)
    key: Ed25519PrivateKey = field(repr=False)

    def sign(self, nonce: str) -> bytes:
        """What proves that we are."""
        return base64.b64encode(self.key.sign(nonce.encode()))


def read_credentials(file: Path) -> Credentials:
    """What is in the file; raises SettingsInvalid, and never says what is secret in it."""
    text = _text(file)
    if JWT not in text and SEED not in text:
        return _credentials_of_seed(file, text.strip(), None)
    jwt, seed = _section(text, JWT), _section(text, SEED)
    for name, found in ((JWT, jwt), (SEED, seed)):
        if not found:
            raise SettingsInvalid(source=str(file), detail=f"has no part {name!r}; make the credentials file again")
    made = _credentials_of_seed(file, seed, jwt)
    if _subject(file, jwt) != made.public:
        raise SettingsInvalid(source=str(file), detail="has a JWT and a seed of different users; make it again")
    return made


def connect_arguments(client: Client, file: Path) -> dict[str, Any]:
    """What the client is told to connect with; raises SettingsInvalid."""
    found = read_credentials(file)
    told: dict[str, Any] = {"user": found.public}  # so that it signs at all; the name itself is not sent
    if found.jwt is not None:
        return {**told, "signature_cb": _signs_with(file), "user_jwt_cb": _jwt_of(file)}
    untyped: Any = client

    def sign(nonce: str) -> bytes:
        current = _current_credentials(file)
        untyped._public_nkey = current.public  # noqa: SLF001 - the library has no other way in but its own reader
        return current.sign(nonce)

    return {**told, "signature_cb": sign}


def _current_credentials(file: Path) -> Credentials:
    """As the file is now, for the client: what it does not know as an error of its own ends its attempts to connect."""
    try:
        return read_credentials(file)
    except SettingsInvalid as error:
        raise NatsError(str(error)) from error


def _signs_with(file: Path) -> Callable[[str], bytes]:
    def sign(nonce: str) -> bytes:
        return _current_credentials(file).sign(nonce)

    return sign


def _jwt_of(file: Path) -> Callable[[], bytes]:
    def jwt() -> bytes:
        return (_current_credentials(file).jwt or "").encode()

    return jwt


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise SettingsInvalid(source=str(file), detail=f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsInvalid(source=str(file), detail="is no NATS credentials file: it is no text") from None


def _section(text: str, name: str) -> str:
    """What stands between the lines that begin and end it; empty when they are not there."""
    _, begun, rest = text.partition(f"BEGIN {name}")
    inside, ended, _ = rest.partition(f"END {name}")
    return inside.strip("- \t\r\n") if begun and ended else ""


def _credentials_of_seed(file: Path, seed: str, jwt: str | None) -> Credentials:
    key = _key(seed)
    if key is None:
        raise SettingsInvalid(
            source=str(file), detail="is no NATS credentials file and no user's nkey seed, which begins with SU"
        )
    public = bytes([_USER]) + key.public_key().public_bytes_raw()
    return Credentials(public=_encoded(public), jwt=jwt, key=key)


def _key(seed: str) -> Ed25519PrivateKey | None:
    """The key of a user's seed; None when it is none, or somebody mistyped it."""
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        return None
    told, check = raw[:-2], raw[-2:]
    kinds = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
    if len(raw) != 36 or told[:2] != kinds or _checksum(told) != check:
        return None
    return Ed25519PrivateKey.from_private_bytes(told[2:])


def _subject(file: Path, jwt: str) -> str:
    """Whom a JWT is about. Whether it is true is the server's to say."""
    try:
        _, claims, _ = jwt.split(".")
        said: Any = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return str(said["sub"])
    except (ValueError, KeyError, TypeError):
        raise SettingsInvalid(source=str(file), detail="has a JWT that cannot be read; make it again") from None


def _encoded(raw: bytes) -> str:
    return base64.b32encode(raw + _checksum(raw)).decode().rstrip("=")


def _checksum(raw: bytes) -> bytes:
    return binascii.crc_hqx(raw, 0).to_bytes(2, "little")
