"""The application in this process and through a gateway: the same calls, with the same parameters and answers."""

import inspect
from typing import Any

import pytest

from trellis.api.agents import LocalAgents
from trellis.api.artifacts import LocalArtifacts
from trellis.api.proposals import LocalProposals
from trellis.api.runs import LocalRuns
from trellis.http.resources import Agents, Artifacts, Proposals, Runs

PARTS: list[tuple[type[Any], type[Any]]] = [
    (LocalAgents, Agents),
    (LocalArtifacts, Artifacts),
    (LocalProposals, Proposals),
    (LocalRuns, Runs),
]
OF_SERVICES = {"stage"}
"""Calls of the NLM backend; no command makes them."""
ALONE = {"change", "document", "execute_until", "find", "pending"}
"""Calls for one side: a status or a stored thing for a route, executing runs here, and a list that is `list(status=…)`."""


def calls(part: type[Any]) -> dict[str, inspect.Signature]:
    named = {name: call for name, call in vars(part).items() if not name.startswith("_")}
    return {name: inspect.signature(call) for name, call in named.items() if name not in OF_SERVICES | ALONE}


@pytest.mark.parametrize("local, remote", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_the_application_has_the_same_calls_locally_and_through_a_gateway(
    local: type[Any], remote: type[Any]
):
    assert calls(local) == calls(remote)
