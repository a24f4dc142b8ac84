"""Signatures of callbacks: they prove the sender, the job and the time of a body (D26).

Invariants:
- A key is derived for one role and one job, so a signature for one job is not valid for another.
- The signature covers id, timestamp and body, in the form of Standard Webhooks: headers `webhook-id`,
  `webhook-timestamp` and `webhook-signature`, the last with one or more `v1,BASE64`.
- It is valid for five minutes around its timestamp, and compared in constant time.
- Several secrets may verify while only one signs, so that a secret can be rotated without downtime.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trellis.engine.errors import Refused

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
WINDOW_S = 300.0
SIGNATURES_MAX = 5
SIGNATURE_CHARS_MAX = 500
ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_LABEL = b"trellis callback v1"
_ID = re.compile(ID_PATTERN)
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_VERSION = "v1,"


class SignatureRefused(Refused):
    """The callback is refused: {problem}."""

    code = "AUTH_REQUIRED"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackSignature:
    """The id and timestamp of a valid signature."""

    id: str
    timestamp: int


def job_key(secret: bytes, role: str, job_id: str) -> bytes:
    """The key of one role for one job: one HKDF step (RFC 5869) on the secret."""
    parts = (_LABEL, role.encode(), job_id.encode())
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, info + b"\x01", hashlib.sha256)


def signed_headers(key: bytes, *, id_: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers for a body."""
    return {
        ID_HEADER: id_,
        TIMESTAMP_HEADER: str(timestamp),
        SIGNATURE_HEADER: _VERSION + _signature(key, id_, str(timestamp), body),
    }


def check_headers(headers: Mapping[str, str], *, now: float) -> CallbackSignature:
    """The id and timestamp, if the headers are well-formed and recent; raises SignatureRefused.

    Does not verify a signature.
    """
    id_, timestamp = headers.get(ID_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
    given = headers.get(SIGNATURE_HEADER, "")
    if not given:
        raise SignatureRefused(problem=f"it has no {SIGNATURE_HEADER}; sign id.timestamp.body with the key of this job")
    if not _ID.fullmatch(id_) or not _TIMESTAMP.fullmatch(timestamp):
        problem = f"{ID_HEADER} must be 1 to 64 letters, digits, - and _, and {TIMESTAMP_HEADER} seconds since 1970"
        raise SignatureRefused(problem=problem)
    if len(given) > SIGNATURE_CHARS_MAX or len(given.split(" ")) > SIGNATURES_MAX:
        raise SignatureRefused(problem=f"{SIGNATURE_HEADER} has more than {SIGNATURES_MAX} signatures")
    if abs(now - int(timestamp)) > WINDOW_S:
        raise SignatureRefused(
            problem=f"it was signed more than {WINDOW_S:g} s ago or ahead; sign it again when it is sent"
        )
    return CallbackSignature(id=id_, timestamp=int(timestamp))


def check_signature(headers: Mapping[str, str], body: bytes, keys: Sequence[bytes], *, now: float) -> CallbackSignature:
    """The id and timestamp, if one of the keys signed the body recently; raises SignatureRefused."""
    signature = check_headers(headers, now=now)
    given, timestamp = headers.get(SIGNATURE_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
    candidates = [one.removeprefix(_VERSION).encode() for one in given.split(" ") if one.startswith(_VERSION)]
    wanted = [_signature(key, signature.id, timestamp, body).encode() for key in keys]
    # Compare all pairs without stopping at the first, so that timing reveals nothing.
    fits = [hmac.compare_digest(one, other) for one in candidates for other in wanted]
    if not any(fits):
        raise SignatureRefused(
            problem="no signature fits; sign id.timestamp.body with the key of this job, as v1,BASE64"
        )
    return signature


def _signature(key: bytes, id_: str, timestamp: str, body: bytes) -> str:
    signed = b".".join((id_.encode(), timestamp.encode(), body))
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
