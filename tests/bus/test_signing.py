"""Keys and signatures: as the SDK makes and checks them, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cap.packet_boundary import finalize_packet, parse_packet, verify_packet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.bus.test_cap import AT, BODIES, PLAIN, packet_of
from trellis.bus.envelope import PacketRefused
from trellis.bus.messages import ErrorCode, JobProgress, Packet
from trellis.bus.wire.cap import decode, encode
from trellis.bus.wire.signing import Keys, read_keys
from trellis.engine.errors import SettingsInvalid

OURS, THEIRS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
LOG = logging.getLogger("test")

Maker = Callable[..., Keys]


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keys(tmp_path: Path) -> Maker:
    (tmp_path / "own.pem").write_bytes(pem(OURS))
    folder = tmp_path / "known"
    folder.mkdir()
    (folder / "w-1.pem").write_bytes(public_pem(THEIRS))

    def make(*, required: bool = True) -> Keys:
        return read_keys(sender_id="trellis", key_file=tmp_path / "own.pem", keys_dir=folder, required=required)

    return make


def signed_by_sdk(key: ec.EllipticCurvePrivateKey, sender_id: str = "w-1") -> bytes:
    packet = Packet(trace_id="t", sender_id=sender_id, created_at=AT, body=JobProgress(job_id="j"))
    return finalize_packet(parse_packet(encode(packet, PLAIN)), key).SerializeToString(deterministic=True)


@pytest.mark.requirement("BUS-2")
def test_the_sdk_accepts_our_signature_on_every_message(keys: Maker):
    for body in BODIES.values():
        packet = packet_of(body)
        message = parse_packet(encode(packet, keys()))
        assert verify_packet(message, {"w-1": OURS.public_key()}, LOG)
        message.trace_id += "x"
        assert not verify_packet(message, {"w-1": OURS.public_key()}, LOG)


@pytest.mark.requirement("BUS-2")
def test_we_accept_the_sdks_signature(keys: Maker):
    assert decode(signed_by_sdk(THEIRS), keys()).sender_id == "w-1"


def test_what_we_sign_ourselves_we_accept(keys: Maker):
    packet = packet_of(JobProgress(job_id="j"), "trellis")
    assert decode(encode(packet, keys()), keys()) == packet


@pytest.mark.parametrize("case", ["unsigned", "another's key", "unknown sender", "changed", "garbage"])
def test_what_is_not_signed_by_its_sender_is_refused_where_signatures_are_required(keys: Maker, case: str):
    changed = parse_packet(signed_by_sdk(THEIRS))
    changed.trace_id = "another"
    garbage = parse_packet(signed_by_sdk(THEIRS))
    garbage.signature = b"not a signature"
    data = {
        "unsigned": encode(packet_of(JobProgress(job_id="j")), PLAIN),
        "another's key": signed_by_sdk(OURS),
        "unknown sender": signed_by_sdk(THEIRS, "w-2"),
        "changed": changed.SerializeToString(),
        "garbage": garbage.SerializeToString(),
    }[case]
    with pytest.raises(PacketRefused) as refused:
        decode(data, keys())
    missing = case == "unsigned"
    assert refused.value.error_code is (ErrorCode.SIGNATURE_MISSING if missing else ErrorCode.SIGNATURE_INVALID)


def test_where_signatures_are_not_required_only_a_wrong_one_of_a_known_sender_is_refused(keys: Maker):
    relaxed = keys(required=False)
    decode(encode(packet_of(JobProgress(job_id="j")), PLAIN), relaxed)
    decode(signed_by_sdk(THEIRS, "w-2"), relaxed)
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(OURS), relaxed)


def test_a_key_that_is_added_later_is_found(keys: Maker, tmp_path: Path):
    made = keys()
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(THEIRS, "w-2"), made)
    (tmp_path / "known" / "w-2.pem").write_bytes(public_pem(THEIRS))
    assert decode(signed_by_sdk(THEIRS, "w-2"), made).sender_id == "w-2"


def test_a_key_that_cannot_be_read_later_leaves_the_others_in_force(keys: Maker, tmp_path: Path):
    made = keys()
    (tmp_path / "known" / "w-2.pem").write_bytes(b"half a key")
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(OURS, "w-2"), made)
    assert decode(signed_by_sdk(THEIRS), made).sender_id == "w-1"


@pytest.mark.requirement("BUS-2")
def test_a_key_that_is_taken_away_or_replaced_counts_no_more(keys: Maker, tmp_path: Path):
    made, file = keys(), tmp_path / "known" / "w-1.pem"
    assert decode(signed_by_sdk(THEIRS), made).sender_id == "w-1"
    file.write_bytes(public_pem(OURS))
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(THEIRS), made)
    assert decode(signed_by_sdk(OURS), made).sender_id == "w-1"
    file.unlink()
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(OURS), made)


@pytest.mark.parametrize("sender_id", ["../own", "known/w-1", "..", "", "a" * 250])
def test_a_sender_does_not_choose_a_file_outside_the_folder(keys: Maker, sender_id: str):
    assert (
        keys().fault(sender_id, b"said", OURS.sign(b"said", ec.ECDSA(hashes.SHA256()))) is ErrorCode.SIGNATURE_INVALID
    )


def test_signatures_cannot_be_required_without_a_key_of_our_own(tmp_path: Path):
    with pytest.raises(SettingsInvalid, match="no key to sign our own"):
        read_keys(sender_id="trellis", key_file=None, keys_dir=tmp_path, required=True)


def _rsa() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "content, complaint",
    [(b"nonsense", "no private key"), (_rsa(), "P-256"), (pem(ec.generate_private_key(ec.SECP384R1())), "P-256")],
)
def test_a_key_file_that_is_none_is_named(tmp_path: Path, content: bytes, complaint: str):
    file = tmp_path / "own.pem"
    file.write_bytes(content)
    with pytest.raises(SettingsInvalid, match=complaint) as error:
        read_keys(sender_id="trellis", key_file=file, keys_dir=None, required=False)
    assert "own.pem" in str(error.value)


def test_a_public_key_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "w-1.pem").write_bytes(b"nonsense")
    with pytest.raises(SettingsInvalid, match=r"w-1\.pem"):
        read_keys(sender_id="trellis", key_file=None, keys_dir=tmp_path, required=False)


@pytest.mark.parametrize("name", ["key_file", "keys_dir"])
def test_keys_that_are_not_there_are_named(tmp_path: Path, name: str):
    files = {"key_file": None, "keys_dir": None, name: tmp_path / "nowhere"}
    with pytest.raises(SettingsInvalid, match="cannot be read"):
        read_keys(sender_id="trellis", required=False, **files)
