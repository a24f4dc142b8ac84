"""The application in this process and through a gateway: the same calls, with the same parameters and answers."""

import inspect
from inspect import signature
from typing import Any

import pytest

from trellis.api.agents import LocalAgents
from trellis.api.artifacts import LocalArtifacts
from trellis.api.dead_letters import LocalDeadLetters
from trellis.api.feed import LocalFeed
from trellis.api.jobs import LocalJobs
from trellis.api.memory import LocalMemory
from trellis.api.proposals import LocalProposals
from trellis.api.runs import LocalRuns
from trellis.api.safety import LocalSafety
from trellis.api.schedules import LocalSchedules
from trellis.api.system import LocalSystem
from trellis.http.jobs import Jobs
from trellis.http.resources import (
    Agents,
    Artifacts,
    DeadLetters,
    Feed,
    Memory,
    Proposals,
    Runs,
    Safety,
    Schedules,
    System,
)

PARTS: list[tuple[type[Any], type[Any]]] = [
    (LocalAgents, Agents),
    (LocalArtifacts, Artifacts),
    (LocalDeadLetters, DeadLetters),
    (LocalMemory, Memory),
    (LocalProposals, Proposals),
    (LocalRuns, Runs),
    (LocalSafety, Safety),
    (LocalSchedules, Schedules),
    (LocalSystem, System),
]
OF_SERVICES = {"stage", "propose"}
"""Calls of the NLM backend and of agents; no command makes them."""
ALONE = {
    "change",
    "count_failed",
    "document",
    "execute",
    "check_executable",
    "check_requeue",
    "find",
    "history_page",
    "page",
    "pending",
    "traceback",
}
"""Calls for one side: what a route alone asks, executing runs here, and a list that is `list(status=…)`."""


def is_for_one_side(name: str) -> bool:
    """Whether only one side has this call. A route passes its request to calls that end in `_once`."""
    return name in OF_SERVICES | ALONE or name.endswith("_once")


def calls(part: type[Any]) -> dict[str, inspect.Signature]:
    named = {name: call for name, call in vars(part).items() if not name.startswith("_")}
    return {name: inspect.signature(call) for name, call in named.items() if not is_for_one_side(name)}


@pytest.mark.parametrize("local, remote", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_the_application_has_the_same_calls_locally_and_through_a_gateway(
    local: type[Any], remote: type[Any]
):
    assert calls(local) == calls(remote)


def test_events_are_read_with_the_same_parameters_locally_and_through_a_gateway():
    """A ledger answers with rows, which say more."""
    for name in ("find", "page"):
        assert signature(getattr(LocalFeed, name)).parameters == signature(getattr(Feed, name)).parameters


FOR_ROUTES = {"only", "attempts_made", "find", "typed_result", "waits", "successor"}
"""Calls that routes make, which answer with rows and media types."""
OF_LEDGER = {"concurrency_key", "grace_s"}
"""Parameters that a gateway does not take; the commands refuse their options there."""


def test_jobs_are_read_and_changed_with_the_same_parameters_locally_and_through_a_gateway():
    """The answers differ: a ledger has more about a job than a gateway shows."""
    remote = calls(Jobs)
    local = {name: call for name, call in calls(LocalJobs).items() if name not in FOR_ROUTES}
    assert {"list", "get", "result", "context", "cancel", "requeue", "dead_letter", "approve", "deny"} <= set(local)
    for name, call in local.items():
        known = [one for one in call.parameters.values() if one.name not in OF_LEDGER]
        assert known == list(remote[name].parameters.values()), name
