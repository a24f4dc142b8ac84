"""The limits that are settings: waiting runs, lengths of bodies, the grace of a soft cancel, and what counts tokens (D19, D25, D50)."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gateway.conftest import FREE, KEY, VIOLIN, Gateway
from trellis.agents.definition import AgentDefinition
from trellis.app.instance import open_instance
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import new_id
from trellis.engine.errors import SettingsInvalid
from trellis.engine.jobs import Actor, Claim, ClaimId, JobId, Turn, TypeClaim
from trellis.gateway import create_app
from trellis.lifecycles import Role

WORKER = Actor(role=Role.WORKER, name="worker@test:1")


def set_to(gateway: Gateway, **chosen: float) -> Gateway:
    """The same gateway with other settings."""
    instance = replace(gateway.instance, settings=Settings.model_validate(chosen))
    app = create_app(instance, [KEY], monotonic=gateway.clock.monotonic, new_id=new_id, options=FREE)
    return replace(gateway, instance=instance, app=app)


@pytest.mark.requirement("D25")
async def test_as_many_runs_of_an_agent_wait_as_are_set(gateway: Gateway):
    client = set_to(gateway, runs_waiting=2).client(Role.OWNER)
    codes = [(await client.post("/agents/run", json={"agent_slug": VIOLIN})).status_code for _ in range(3)]
    assert codes == [202, 202, 429]
    assert len((await client.get("/runs")).json()["items"]) == 2


@pytest.mark.requirement("D25")
async def test_bodies_are_as_long_as_is_set(gateway: Gateway):
    client = set_to(gateway, body_bytes=2_048, large_body_bytes=4_096).client(Role.OWNER, Role.ORCHESTRATOR)
    for path, size, refused in (
        ("/jobs", 1_900, False),
        ("/jobs", 2_100, True),
        (f"/memory/{VIOLIN}/propose", 4_000, False),
        (f"/memory/{VIOLIN}/propose", 4_200, True),
    ):
        body = '{"type": "work"' + " " * (size - 16) + "}"
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code == 413) == refused, (path, size, answer.text)


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_becomes_hard_after_the_grace_that_is_set(gateway: Gateway):
    limited = set_to(gateway, cancel_grace_s=5.0)
    client, ledger = limited.client(Role.OWNER, Role.CONTROL_PLANE), gateway.instance.ledger
    job_id = (await client.post("/jobs", json={"type": "work", "payload": 1})).json()["job_id"]
    types = (TypeClaim(type="work", lease_s=60.0, heartbeat_s=20.0),)
    await ledger.turn(Turn(actor=WORKER, claim=Claim(claim_id=ClaimId("c"), types=types)))
    assert (await client.post(f"/jobs/{job_id}/cancel", json={"mode": "soft"})).json()["status"] == "running"
    states = []
    for _ in range(2):
        gateway.clock.advance(4.0)
        await gateway.sweep()
        states.append((await ledger.job(JobId(job_id))).state)  # type: ignore[union-attr]
    assert states == ["running", "cancelled"]


@pytest.mark.requirement("D50")
async def test_a_tokenizer_of_an_installed_package_counts_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packages = tmp_path / "packages"
    info = packages / "words-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "words_of_ours.py").write_text("def count(text):\n    return len(text.split())\n\nnothing = None\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[trellis.tokenizers]\nwords = words_of_ours:count\nbroken = words_of_ours:nothing\ngone = words_of_ours:none\n"
    )
    monkeypatch.syspath_prepend(packages)
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    counts = {}
    for name in ("words", "bytes"):
        settings = read_settings({"TRELLIS_TOKENIZER": name}, tmp_path)
        async with open_instance(settings, ledger) as instance:
            await instance.plant()
            view = instance.memory.read(VIOLIN)
            counts[name] = view.token_count
            text = "".join(view.content.values())
            agent = await instance.catalog.load(VIOLIN)
            assert isinstance(agent, AgentDefinition)
            sources = await instance.catalog.sources(VIOLIN, agent)
            counted = len(" ".join(one.text for one in sources.items).split())
            assert (sources.tokens == counted) == (name == "words")
    assert counts["bytes"] == sum(-(-len(part.encode()) // 3) for part in view.content.values())
    assert counts["words"] == len(text.split())
    for name, says in (("broken", "returns how many"), ("gone", "cannot be loaded"), ("none", "broken, bytes, gone")):
        with pytest.raises(SettingsInvalid, match=says):
            async with open_instance(read_settings({"TRELLIS_TOKENIZER": name}, tmp_path), ledger):
                pass
