"""The conditions that a machine knows about itself: room on its disks, and certificates that end."""

import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.gateway.conftest import KEY
from trellis.auth.tokens import issue
from trellis.lifecycles import Role
from trellis.operations.alerts import AlertThresholds, ConditionMet
from trellis.operations.host_conditions import HostConditions

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def host(*folders: Path, **options) -> HostConditions:
    return HostConditions(node="alpine", thresholds=AlertThresholds(), folders=folders, **options)


async def low(conditions: HostConditions) -> list[str]:
    checked = await conditions.disks(NOW)
    looked_at = tuple(f"alpine:{folder}" for folder in conditions.folders)
    assert checked.subjects == looked_at, "it says nothing about other folders and other machines"
    return [one.subject for one in checked.met["disk-low"]]


async def test_a_disk_with_less_than_a_tenth_of_its_space_left_is_low(tmp_path: Path):
    def filled(free: int) -> Callable[[Path], tuple[int, int, int]]:
        return lambda _: (1000, 1000 - free, free)

    assert await low(host(tmp_path, usage=filled(100))) == []
    assert await low(host(tmp_path, usage=filled(99))) == [f"alpine:{tmp_path}"]
    real = HostConditions(
        node="alpine", thresholds=AlertThresholds(disk_percent=100.0), folders=(tmp_path / "not" / "yet",)
    )
    (met,) = (await real.disks(NOW)).met["disk-low"]
    total, _, free = shutil.disk_usage(tmp_path)
    assert met.value == pytest.approx(100.0 * free / total, abs=5.0), "of the disk that the folder will be on"


def certificate(path: Path, ends: datetime) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(1)
        .not_valid_before(ends - timedelta(days=90))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


async def ending(conditions: HostConditions, now: datetime) -> list[ConditionMet]:
    return list((await conditions.ends(now)).met["expiry"])


async def test_a_certificate_that_ends_within_two_weeks_is_told_until_it_is_renewed(tmp_path: Path):
    file = certificate(tmp_path / "tls.pem", NOW + timedelta(days=14))
    conditions = host(certificates={"tls_cert_file": file, "bus_ca_file": tmp_path / "tls.pem"})
    assert await ending(conditions, NOW) == []
    soon = await ending(conditions, NOW + timedelta(hours=1))
    assert [one.subject for one in soon] == ["alpine:tls_cert_file", "alpine:bus_ca_file"]
    (over, _) = await ending(conditions, NOW + timedelta(days=15))
    assert over.text == "What TRELLIS_TLS_CERT_FILE names on alpine ended 1 d ago."
    certificate(file, NOW + timedelta(days=104))
    assert await ending(conditions, NOW + timedelta(days=15)) == []


async def test_a_token_that_ends_within_two_weeks_is_told(tmp_path: Path):
    began = time.time()
    token = issue(KEY, name="up", roles=[Role.CONTROL_PLANE], ttl_s=3600.0, now=began)
    at = datetime.fromtimestamp(began, tz=UTC)
    (met,) = await ending(host(token=lambda: token), at)
    assert met.subject == "alpine:token"
    assert await ending(host(token=lambda: token), at - timedelta(days=15)) == []
    assert await ending(host(token=lambda: "no token"), at) == []


async def test_a_file_that_cannot_be_read_leaves_its_alert_as_it_is(tmp_path: Path):
    file = certificate(tmp_path / "ca.pem", NOW)
    checked = await host(certificates={"tls_cert_file": tmp_path / "gone.pem", "bus_ca_file": file}).ends(NOW)
    assert checked.subjects == ("alpine:bus_ca_file",)
    assert [one.subject for one in checked.unread] == ["alpine:tls_cert_file"]
    assert [one.subject for one in checked.met["expiry"]] == ["alpine:bus_ca_file"], "the other file is looked at"


async def test_an_old_authority_beside_its_successor_raises_no_alert_but_an_old_certificate_of_ones_own_does(
    tmp_path: Path,
):
    old = certificate(tmp_path / "old.pem", NOW + timedelta(days=1)).read_bytes()
    new = certificate(tmp_path / "new.pem", NOW + timedelta(days=90)).read_bytes()
    for bundle, raised in ((old + new, ["alpine:tls_cert_file"]), (new + old, [])):
        file = tmp_path / "bundle.pem"
        file.write_bytes(bundle)
        conditions = host(certificates={"tls_cert_file": file, "bus_ca_file": file})
        assert [one.subject for one in await ending(conditions, NOW)] == raised
