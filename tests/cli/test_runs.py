"""`trellis agents`, `run`, `runs`, `proposals`: a real agent from trigger to reviewed proposal, from the command line."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from trellis.engine.errors import SettingsInvalid
from trellis.instance import open_instance, params_of, places
from trellis.settings import Settings

VIOLIN = "archivist-violin"


@pytest.fixture
def planted(local: Terminal) -> Terminal:
    assert local("migrate").code == 0

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()
            await instance.plant()

    asyncio.run(plant())
    return local


def test_agents_are_listed_with_their_status(planted: Terminal):
    found = {record["slug"]: record["status"] for record in planted("agents", "--json").records}
    assert found == {"architect-guardian": "active", VIOLIN: "active"}
    assert planted("agents", "--limit", "1").out.count("active") == 1


def test_a_malformed_agent_says_what_to_correct_and_stops_only_itself(planted: Terminal):
    file = Path(planted.url.removeprefix("sqlite:///")).parent / "objects" / "agents" / VIOLIN / "_agent.md"
    file.write_text(file.read_text().replace("status: active", "status: activ"))
    found = {record["slug"]: record for record in planted("agents", "--json").records}
    assert found[VIOLIN]["status"] == "malformed"
    assert "did you mean 'active'" in found[VIOLIN]["problems"][0]
    assert found["architect-guardian"]["status"] == "active"
    answer = planted("run", VIOLIN)
    assert answer.code != 0
    assert "did you mean 'active'" in answer.err


@pytest.mark.requirement("PIPE-6", "PIPE-7", "D22")
def test_a_watched_run_ends_with_proposals_that_a_person_decides_about(planted: Terminal):
    status = planted("run", VIOLIN, "--watch", "--json").record
    assert (status["status"], status["steps_completed"]) == ("completed", 4)
    (run,) = planted("runs", "--json").records
    assert (run["job_id"], run["state"]) == (status["run_id"], "completed")
    waiting = [record["job_id"] for record in planted("proposals", "--state", "pending", "--json").records]
    assert set(waiting) < set(status["proposals_created"])
    chosen, other = waiting[:2]
    shown = planted("proposals", "show", chosen, "--json").record
    assert shown["content"]["citations"]
    assert shown["requiresHumanReview"] is False
    assert planted("proposals", "approve", chosen, "--json").record == {
        "proposal": chosen,
        "status": "applied",
        "decided": True,
    }
    refused = planted("proposals", "reject", other, "--note", "short")
    assert (refused.code, "at least 10 characters" in refused.err) == (1, True)
    assert planted("proposals", "reject", other, "--note", "the source is right").code == 0
    again = planted("proposals", "approve", other)
    assert (again.code, f"{other} is rejected" in again.out) == (1, True)


def test_a_run_without_a_watcher_waits_for_a_service(planted: Terminal):
    first, second = (planted("run", VIOLIN, "--param", "topic=bows", "--json").record for _ in range(2))
    assert [(run["status"], run["position"]) for run in (first, second)] == [("queued", 0), ("queued", 1)]


def test_an_agent_or_proposal_that_is_not_there_is_said_so(planted: Terminal):
    missing = planted("run", "nobody").err
    assert "there is no agents/nobody/_agent.md" in missing
    assert "trellis agents" in missing
    unknown = planted("proposals", "--state", "pendng")
    assert unknown.code != 0
    assert "perhaps you mean pending" in unknown.err
    assert "no proposal prop_x" in planted("proposals", "show", "prop_x").err
    assert "no proposal prop_x" in planted("proposals", "approve", "prop_x").err


def test_whoever_cannot_read_the_key_neither_begins_runs_nor_decides(planted: Terminal):
    Path(planted.url.removeprefix("sqlite:///") + ".key").unlink()
    for command in (("run", VIOLIN), ("proposals", "approve", "prop_x")):
        answer = planted(*command)
        assert (answer.code, "may not" in answer.err or "cannot" in answer.err) == (1, True), answer.err


def test_parameters_are_json_where_they_can_be():
    assert params_of(["n=3", "text=a=b", 'list=["x"]']) == {"n": 3, "text": "a=b", "list": ["x"]}
    with pytest.raises(SettingsInvalid, match="no name=value"):
        params_of(["nothing"])


def test_places_lie_beside_an_sqlite_file_and_must_be_set_elsewhere(tmp_path: Path):
    found = places(Settings.model_validate({}), f"sqlite:///{tmp_path}/trellis.db")
    assert (found.objects, found.memory) == (f"file://{tmp_path}/objects", tmp_path / "memory.git")
    with pytest.raises(SettingsInvalid, match="TRELLIS_OBJECTS"):
        places(Settings.model_validate({}), "postgresql://somewhere/db")
    chosen = Settings.model_validate({"objects": "s3://bucket", "memory": tmp_path})
    assert places(chosen, "postgresql://somewhere/db").objects == "s3://bucket"


def test_secrets_of_models_are_shown_nowhere(planted: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_MODEL_KEY", "sk-secret-1")
    monkeypatch.setenv("TRELLIS_NLM_KEY", "sk-secret-2")
    answer = planted("doctor", "--json")
    assert "sk-secret" not in answer.out + answer.err
    assert json.dumps(answer.records)


def test_the_demo_runs_an_agent_and_approves_nothing(local: Terminal, tmp_path: Path):
    folder = tmp_path / "demo"
    answer = local.bare("demo", "--data", str(folder))
    assert answer.code == 0, answer.err
    assert "What waits for you" in answer.out
    assert "“" in answer.out, "a proposal without a quotation is not worth reading"
    states = [record["state"] for record in local.bare("proposals", "--data", str(folder), "--json").records]
    assert set(states) <= {"pending", "applied"}
    assert "pending" in states
    assert list(folder.glob(f"objects/agents/{VIOLIN}/runs/run_*/manifest.json"))


def test_the_demo_knows_its_agents(local: Terminal):
    answer = local.bare("demo", "--agent", "nobody")
    assert answer.code != 0
    assert "archivist-violin" in answer.err
