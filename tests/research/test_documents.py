"""The document of a queue job: exactly the fields of schema 1.3, from acceptance to its end."""

import re

import pytest

from tests.gateway.conftest import VIOLIN
from tests.research.rig import QUESTION, Rig

FIELDS = {
    "job_id": str,
    "run_id": str,
    "job_type": str,
    "agent_slug": str,
    "status": str,
    "attempt": int,
    "max_attempts": int,
    "payload": dict,
    "context": dict,
    "callback": str,
    "created_at": str,
    "updated_at": str,
    "artifact_id": (str, type(None)),
    "error": (str, type(None)),
}


@pytest.mark.requirement("JQ-10", "JQ-13", "D41", "D38")
async def test_a_job_shows_its_document_from_pending_to_complete(rig: Rig):
    job_id = await rig.submit(entity_refs=["violin", "bow"])
    pending = await rig.job(job_id)
    assert {name for name, kind in FIELDS.items() if not isinstance(pending.get(name, ...), kind)} == set()
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", job_id)
    assert re.fullmatch(r"run_\d{4}-\d{2}-\d{2}_\d{6}_[0-9a-f]{6}", pending["run_id"]), "made by the gateway"
    told = {name: pending[name] for name in FIELDS if name not in {"run_id", "created_at", "updated_at"}}
    assert told == {
        "job_id": job_id,
        "job_type": "RESEARCH",
        "agent_slug": VIOLIN,
        "status": "PENDING",
        "attempt": 0,
        "max_attempts": 3,
        "payload": QUESTION,
        "context": {"memory_snapshot_url": None, "entity_refs": ["violin", "bow"]},
        "callback": f"http://gateway/jobs/{job_id}/result",
        "artifact_id": None,
        "error": None,
    }
    done = await rig.work(job_id, "COMPLETE")
    epoch = rig.nlm.asked[0].epoch
    assert done["context"]["memory_snapshot_url"] == f"http://gateway/jobs/{job_id}/context/{epoch}"
    artifact = (await rig.owner.get(f"/artifacts/{done['artifact_id']}")).json()
    assert (artifact["job_id"], artifact["type"], artifact["finalized"]) == (job_id, "RESEARCH_BRIEF", True)
    assert (done["run_id"], done["created_at"]) == (pending["run_id"], pending["created_at"])
    assert (await rig.owner.get(f"/runs/{done['run_id']}/status")).status_code == 404, "it has no run folder"
