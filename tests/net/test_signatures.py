"""Signatures of callbacks: nothing fits but what was signed, for that job, lately."""

import base64
import hashlib
import hmac

import pytest

from trellis.net.signatures import WINDOW_S, SignatureRefused, check_signature, job_key, signed_headers

SECRET, OLD = b"s" * 32, b"o" * 32
BODY = b'{"status": "COMPLETE"}'
NOW = 1_771_056_000.0
KEY = job_key(SECRET, "nlm-backend", "job-1")


def signed(key: bytes = KEY, **changed: str) -> dict[str, str]:
    made = signed_headers(key, id_="msg_1", timestamp=int(NOW), body=BODY)
    return {**made, **{name.replace("_", "-"): value for name, value in changed.items()}}


@pytest.mark.requirement("D26")
def test_signed_callback_is_accepted():
    found = check_signature(signed(), BODY, [KEY], now=NOW)
    assert (found.id, found.timestamp) == ("msg_1", int(NOW))


def test_the_form_is_that_of_standard_webhooks():
    """Computed by another implementation of the same rule."""
    text = b"msg_1.1771056000." + BODY
    expected = "v1," + base64.b64encode(hmac.new(KEY, text, hashlib.sha256).digest()).decode()
    assert signed()["webhook-signature"] == expected


@pytest.mark.requirement("D26")
def test_a_change_of_any_bit_is_refused():
    headers = signed()
    signature = headers["webhook-signature"]
    for index in range(len(BODY) * 8):
        flipped = bytearray(BODY)
        flipped[index // 8] ^= 1 << index % 8
        with pytest.raises(SignatureRefused):
            check_signature(headers, bytes(flipped), [KEY], now=NOW)
    for changed in (
        signed(webhook_id="msg_2"),
        signed(webhook_timestamp=str(int(NOW) + 1)),
        signed(webhook_signature=signature[:-2] + ("A" if signature[-2] != "A" else "B") + "="),
        signed(webhook_signature=signature.replace("v1,", "v2,")),
        signed(webhook_signature=signature.removeprefix("v1,")),
        signed(webhook_signature="v1,"),
        signed(webhook_signature=""),
        signed(webhook_signature="v1," + "Ä"),
        signed(webhook_id=""),
        signed(webhook_id="a.b"),
        signed(webhook_id="x" * 65),
        signed(webhook_timestamp="soon"),
        signed(webhook_timestamp="-1"),
        signed(webhook_timestamp="1" * 13),
        signed(webhook_signature=" ".join([signature] * 6)),
        {},
    ):
        with pytest.raises(SignatureRefused):
            check_signature(changed, BODY, [KEY], now=NOW)


@pytest.mark.requirement("D26")
def test_a_key_is_for_one_job_and_one_role():
    others = [
        job_key(SECRET, "nlm-backend", "job-2"),
        job_key(SECRET, "worker", "job-1"),
        job_key(OLD, "nlm-backend", "job-1"),
        job_key(SECRET, "nlm-backendjob-1", ""),
        job_key(SECRET, "nlm-backen", "djob-1"),
    ]
    assert len({KEY, *others}) == 6
    for other in others:
        with pytest.raises(SignatureRefused):
            check_signature(signed(other), BODY, [KEY], now=NOW)


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    "off_s, good", [(-WINDOW_S, True), (WINDOW_S, True), (-WINDOW_S - 1, False), (WINDOW_S + 1, False)]
)
def test_five_minutes_are_the_window(off_s: float, good: bool):
    if good:
        check_signature(signed(), BODY, [KEY], now=NOW + off_s)
    else:
        with pytest.raises(SignatureRefused, match="300 s"):
            check_signature(signed(), BODY, [KEY], now=NOW + off_s)


def test_a_secret_can_be_changed_without_a_pause():
    old = job_key(OLD, "nlm-backend", "job-1")
    both = [KEY, old]
    check_signature(signed(), BODY, both, now=NOW)
    check_signature(signed(old), BODY, both, now=NOW)
    twice = f"{signed(old)['webhook-signature']} {signed()['webhook-signature']}"
    check_signature(signed(webhook_signature=twice), BODY, [KEY], now=NOW)


def test_without_a_key_nothing_fits():
    with pytest.raises(SignatureRefused):
        check_signature(signed(), BODY, [], now=NOW)
