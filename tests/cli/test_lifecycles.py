"""`trellis lifecycles`."""

import pytest

from tests.cli.conftest import Terminal
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.describe import mermaid


def test_every_lifecycle_is_listed_and_described(local: Terminal):
    assert [record["name"] for record in local("lifecycles", "--json").records] == list(LIFECYCLES)
    for name, lifecycle in LIFECYCLES.items():
        record = local("lifecycles", name, "--json").record
        assert [state["state"] for state in record["states"]] == list(lifecycle.by_name)
        assert len(record["transitions"]) == len(lifecycle.transitions)
        assert all(state in local("lifecycles", name).out for state in lifecycle.by_name)


def test_a_lifecycle_is_drawn(local: Terminal):
    lifecycle = LIFECYCLES["leased-job"]
    assert local("lifecycles", "leased-job", "--mermaid").out.strip() == mermaid(lifecycle).strip()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["leased_job"], "perhaps you mean leased-job"),
        (["--mermaid"], "name one of"),
    ],
)
def test_unknown_lifecycle_cannot_be_drawn(local: Terminal, arguments, says):
    answer = local("lifecycles", *arguments)
    assert (answer.code, says in answer.err) == (2, True)
