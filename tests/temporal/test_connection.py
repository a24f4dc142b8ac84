"""The connection to a server that needs TLS, a client certificate and an API key, and what is said if one is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.layers.temporal import TemporalRig
from tests.servers.certificates import Authority
from tests.servers.temporal import TemporalServer, free_port
from tests.servers.temporal_front import tls_front
from trellis.documents.errors import TemporalAway
from trellis.engine.errors import SettingsInvalid
from trellis.runs.temporal.connection import connect, read_tls
from trellis.runs.temporal.options import TemporalTls
from trellis.runs.temporal.worker import RECONNECT_S

KEY = "the-key-of-tests"


@pytest.mark.requirement("PIPE-2")
async def test_runs_are_driven_over_tls_and_wrong_certificates_and_keys_are_refused_with_the_reason(
    rig: TemporalRig, temporal_server: TemporalServer, tmp_path: Path
):
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    mine, stranger = ours.pair("mine"), other.pair("stranger")
    tls = TemporalTls(ca_file=ours.file, cert_file=mine[0], key_file=mine[1])
    async with tls_front(temporal_server, ours.pair("server"), clients=ours.file, api_key=KEY) as address:
        right = replace(rig.options, address=address, tls=tls, api_key=KEY)
        refused = {
            "it may need TLS": replace(right, tls=None, api_key=None),
            "its certificate is refused (UnknownIssuer); TRELLIS_TEMPORAL_CA_FILE": replace(
                right, tls=replace(tls, ca_file=other.file)
            ),
            "refused (UnknownIssuer)": replace(right, tls=replace(tls, ca_file=None)),
            "or a client certificate": replace(right, tls=TemporalTls(ca_file=ours.file)),
            "it closed the connection": replace(right, tls=replace(tls, cert_file=stranger[0], key_file=stranger[1])),
            "refuses this process (Unauthenticated); see TRELLIS_TEMPORAL_API_KEY": replace(right, api_key="guess"),
        }
        for reason, wrong in refused.items():
            with pytest.raises(TemporalAway) as error:
                await connect(wrong)
            assert reason in str(error.value)
            assert KEY not in str(error.value)
        assert KEY not in repr(right)
        rig.options = right
        run_id = await rig.trigger(await rig.agent("gardener"))
        await rig.start()
        await rig.shows(run_id, "completed")
        await rig.kill()


async def test_a_renewed_ca_is_read_while_the_process_lives(
    rig: TemporalRig, temporal_server: TemporalServer, tmp_path: Path
):
    old, new, trusted, port = Authority(tmp_path, "old"), Authority(tmp_path, "new"), tmp_path / "ca.pem", free_port()
    trusted.write_bytes(old.file.read_bytes())
    async with tls_front(temporal_server, old.pair("first"), port=port) as address:
        rig.options = replace(rig.options, address=address, tls=TemporalTls(ca_file=trusted))
        await rig.start()
        (worker,) = rig._workers
        assert worker.is_connected
    trusted.write_bytes(new.file.read_bytes())
    async with tls_front(temporal_server, new.pair("second"), port=port):
        assert not await worker.run_once()
        rig.clock.advance(RECONNECT_S)
        assert await worker.run_once()
        run_id = await rig.trigger(await rig.agent("gardener"))
        await rig.shows(run_id, "completed")
        await rig.kill()


def test_a_client_certificate_with_the_key_of_another_one_is_refused(tmp_path: Path):
    ours = Authority(tmp_path, "ours")
    (one, _), (_, key) = ours.pair("one"), ours.pair("two")
    with pytest.raises(SettingsInvalid, match=r"TRELLIS_TEMPORAL_KEY_FILE: .*are no certificate with its key"):
        read_tls(TemporalTls(cert_file=one, key_file=key))
