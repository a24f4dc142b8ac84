"""Keys and signatures: as the SDK makes and checks them, and what is refused."""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cap.packet_boundary import finalize_packet, parse_packet, verify_packet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, utils

from tests.bus.test_cap import AT, BODIES, PLAIN, packet_of
from trellis.bus.messages import ErrorCode, JobProgress, Packet, PacketRefused
from trellis.bus.wire.cap import decode, encode
from trellis.bus.wire.signatures import PacketDelivery, PacketKeys, read_keys
from trellis.engine.errors import SettingsInvalid

OURS, THEIRS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
LOG = logging.getLogger("test")

Maker = Callable[..., PacketKeys]


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def private_file(path: Path, body: bytes) -> Path:
    """A key file as it must be: only its owner can read it."""
    path.touch(mode=0o600)
    path.write_bytes(body)
    return path


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keys(tmp_path: Path) -> Maker:
    private_file(tmp_path / "own.pem", pem(OURS))
    folder = tmp_path / "known"
    folder.mkdir()
    (folder / "w-1.pem").write_bytes(public_pem(THEIRS))

    def make(*, required: bool = True) -> PacketKeys:
        return read_keys(sender_id="trellis", key_file=tmp_path / "own.pem", keys_dir=folder, required=required)

    return make


def signed_by_sdk(key: ec.EllipticCurvePrivateKey, sender_id: str = "w-1") -> bytes:
    packet = Packet(trace_id="t", sender_id=sender_id, created_at=AT, body=JobProgress(job_id="j"))
    return finalize_packet(parse_packet(encode(packet, PLAIN)), key).SerializeToString(deterministic=True)


@pytest.mark.requirement("BUS-2")
def test_the_sdk_accepts_our_signature_on_every_message(keys: Maker):
    for body in BODIES.values():
        packet = packet_of(body)
        message = parse_packet(encode(packet, keys(), subject="job.code.review", message_id="m-1"))
        assert message.signature_metadata.audience == "job.code.review"
        assert verify_packet(message, {"w-1": OURS.public_key()}, LOG)
        message.trace_id += "x"
        assert not verify_packet(message, {"w-1": OURS.public_key()}, LOG)


@pytest.mark.requirement("BUS-2")
def test_we_accept_the_sdks_signature(keys: Maker):
    assert decode(signed_by_sdk(THEIRS), keys()).sender_id == "w-1"


def test_packet_signed_by_ourselves_is_accepted(keys: Maker):
    packet = packet_of(JobProgress(job_id="j"), "trellis")
    assert decode(encode(packet, keys()), keys()) == packet


@pytest.mark.parametrize("case", ["unsigned", "another's key", "unknown sender", "changed", "garbage"])
def test_packet_not_signed_by_its_sender_is_refused_where_signatures_are_required(keys: Maker, case: str):
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


def test_sender_without_a_known_key_needs_no_signature_unless_required(keys: Maker):
    relaxed = keys(required=False)
    decode(encode(packet_of(JobProgress(job_id="j"), "w-2"), PLAIN), relaxed)
    decode(signed_by_sdk(THEIRS, "w-2"), relaxed)
    with pytest.raises(PacketRefused):
        decode(signed_by_sdk(OURS), relaxed)


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("sender_id", ["w-1", "trellis"])
def test_unsigned_packet_of_a_sender_with_a_known_key_is_refused(keys: Maker, sender_id: str):
    stripped = parse_packet(signed_by_sdk(THEIRS if sender_id == "w-1" else OURS, sender_id))
    stripped.ClearField("signature")
    with pytest.raises(PacketRefused, match="must sign") as refused:
        decode(stripped.SerializeToString(), keys(required=False))
    assert refused.value.error_code is ErrorCode.SIGNATURE_MISSING


def test_a_sender_whose_key_file_is_half_written_stays_known(keys: Maker, tmp_path: Path):
    relaxed = keys(required=False)
    (tmp_path / "known" / "w-1.pem").write_bytes(b"half a key")
    for data in (encode(packet_of(JobProgress(job_id="j")), PLAIN), signed_by_sdk(THEIRS)):
        with pytest.raises(PacketRefused):
            decode(data, relaxed)


# --- for which subject, and when -------------------------------------------------------------------------------------


def own(keys: PacketKeys, *, subject: str = "worker.w-1.jobs", message_id: str = "m-1") -> bytes:
    """A packet of ours, as it goes out to this subject."""
    packet = packet_of(JobProgress(job_id="j"), "trellis")
    return encode(packet, keys, subject=subject, message_id=message_id)


def came(subject: str = "worker.w-1.jobs", *, after_s: float = 0.0, **how: Any) -> PacketDelivery:
    return PacketDelivery(subject=subject, at=AT + timedelta(seconds=after_s), **how)


@pytest.mark.requirement("BUS-2")
def test_a_packet_that_was_signed_for_one_subject_is_refused_on_another(keys: Maker):
    made = keys()
    data = own(made)
    assert decode(data, made, delivery=came()).sender_id == "trellis"
    with pytest.raises(PacketRefused, match=r"signed for worker\.w-1\.jobs"):
        decode(data, made, delivery=came("worker.w-2.jobs"))


def test_signed_fields_of_a_packet_cannot_be_changed(keys: Maker):
    made = keys()
    for change in ("audience", "all of it"):
        changed = parse_packet(own(made))
        if change == "audience":
            changed.signature_metadata.audience = "worker.w-2.jobs"
        else:
            changed.ClearField("signature_metadata")
        with pytest.raises(PacketRefused, match="not its sender's"):
            decode(changed.SerializeToString(), made, delivery=came("worker.w-2.jobs"))


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("form", ["ours", "the SDK's"])
@pytest.mark.parametrize("after_s, taken", [(0, True), (299, True), (-299, True), (301, False), (-301, False)])
def test_a_signed_packet_is_taken_while_it_is_fresh(keys: Maker, form: str, after_s: float, *, taken: bool):
    made = keys()
    data = own(made) if form == "ours" else signed_by_sdk(THEIRS)
    if taken:
        decode(data, made, delivery=came(after_s=after_s))
        return
    with pytest.raises(PacketRefused, match="300 s is the limit; compare the clocks") as refused:
        decode(data, made, delivery=came(after_s=after_s))
    assert refused.value.error_code is ErrorCode.SIGNATURE_INVALID


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("form", ["ours", "the SDK's"])
def test_a_signed_packet_that_is_sent_again_is_refused(keys: Maker, form: str):
    made = keys()
    data = own(made) if form == "ours" else signed_by_sdk(THEIRS)
    decode(data, made, delivery=came(after_s=1))
    for again in (data, same_with_another_signature(data)):
        with pytest.raises(PacketRefused, match="it was sent before"):
            decode(again, made, delivery=came(after_s=2))
    decode(data, made, delivery=came(after_s=2, listener=7))  # another listener has not had it
    decode(own(made, message_id="m-2"), made, delivery=came(after_s=2))  # it says the same, and is another


def same_with_another_signature(data: bytes) -> bytes:
    """Whoever sees a signature can make a second one that is good for the same bytes: (r, n - s)."""
    message = parse_packet(data)
    r, s = utils.decode_dss_signature(message.signature)
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    message.signature = utils.encode_dss_signature(r, order - s)
    return message.SerializeToString(deterministic=True)


def test_signed_stream_packet_may_be_redelivered_from_its_own_sequence(keys: Maker):
    made = keys()
    data = own(made)
    for _ in range(2):  # the first time its handler failed
        decode(data, made, delivery=came(sequence=4))
    with pytest.raises(PacketRefused, match="it was sent before"):
        decode(data, made, delivery=came(sequence=5))


# --- key files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    file = private_file(tmp_path / "own.pem", pem(OURS))
    file.chmod(mode)
    with pytest.raises(SettingsInvalid, match=r"others can read .*; run: chmod 600"):
        read_keys(sender_id="trellis", key_file=file, keys_dir=None, required=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_private_key_of_another_user_is_refused(tmp_path: Path):
    file = private_file(tmp_path / "own.pem", pem(OURS))
    os.chown(file, 12_345, -1)
    with pytest.raises(SettingsInvalid, match="belongs to another user"):
        read_keys(sender_id="trellis", key_file=file, keys_dir=None, required=False)


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
    "make, complaint",
    [
        (lambda: b"nonsense", "no private key"),
        (_rsa, "P-256"),
        (lambda: pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
    ],
    ids=["nonsense", "RSA", "P-384"],
)
def test_a_key_file_that_is_none_is_named(tmp_path: Path, make: Callable[[], bytes], complaint: str):
    file = private_file(tmp_path / "own.pem", make())
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
