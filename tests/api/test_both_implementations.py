"""The application in this process and through a gateway: the same calls, with the same parameters and answers."""

import inspect
from typing import Any

import pytest

from trellis.api.agents import LocalAgents
from trellis.api.approvals import LocalApprovals
from trellis.api.artifacts import LocalArtifacts
from trellis.api.dead_letters import LocalDeadLetters
from trellis.api.jobs import LocalJobs
from trellis.api.memory import LocalMemory
from trellis.api.proposals import LocalProposals
from trellis.api.runs import LocalRuns
from trellis.api.safety import LocalSafety
from trellis.http.jobs import Jobs
from trellis.http.resources import Agents, Artifacts, DeadLetters, Memory, Proposals, Runs, Safety

PARTS: list[tuple[type[Any], type[Any]]] = [
    (LocalAgents, Agents),
    (LocalArtifacts, Artifacts),
    (LocalDeadLetters, DeadLetters),
    (LocalMemory, Memory),
    (LocalProposals, Proposals),
    (LocalRuns, Runs),
    (LocalSafety, Safety),
]
OF_SERVICES = {"stage", "propose"}
"""Calls of the NLM backend and of agents; no command makes them."""
ALONE = {
    "as_only_watcher",
    "change",
    "count_failed",
    "decide",
    "document",
    "execute_until",
    "find",
    "held_job",
    "history_page",
    "page",
    "pending",
    "traceback",
}
"""Calls for one side: what a route alone asks, executing runs here, and a list that is `list(status=…)`."""


def calls(part: type[Any]) -> dict[str, inspect.Signature]:
    named = {name: call for name, call in vars(part).items() if not name.startswith("_")}
    return {name: inspect.signature(call) for name, call in named.items() if name not in OF_SERVICES | ALONE}


@pytest.mark.parametrize("local, remote", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_the_application_has_the_same_calls_locally_and_through_a_gateway(
    local: type[Any], remote: type[Any]
):
    assert calls(local) == calls(remote)


def test_a_held_job_is_decided_about_with_the_same_calls_locally_and_through_a_gateway():
    remote = calls(Jobs)
    for name, call in calls(LocalApprovals).items():
        assert call.parameters == remote[name].parameters, name


FOR_ROUTES = {"only", "find", "typed_result"}
"""Calls that routes make, which answer with rows and media types."""
OF_LEDGER = {"concurrency_key"}
"""Parameters that a gateway does not take; the commands refuse their options there."""


def test_jobs_are_read_with_the_same_parameters_locally_and_through_a_gateway():
    """The answers differ: a ledger has more about a job than a gateway shows."""
    remote = calls(Jobs)
    local = {name: call for name, call in calls(LocalJobs).items() if name not in FOR_ROUTES | {"holds"}}
    assert {"list", "get", "result", "context"} <= set(local)
    for name, call in local.items():
        known = [one for one in call.parameters.values() if one.name not in OF_LEDGER]
        assert known == list(remote[name].parameters.values()), name
