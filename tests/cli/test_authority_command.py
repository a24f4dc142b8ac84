"""`trellis authority`: the table by which every call is decided."""

import pytest

from tests.cli.conftest import Terminal
from trellis.auth.matrices import RULES
from trellis.lifecycles import Role


@pytest.mark.requirement("AUTH-7")
def test_every_rule_is_listed_with_the_roles_that_have_the_right(local: Terminal):
    listed = {one["name"]: one for one in local("authority", "--json").records}
    assert {name: one["grants"] for name, one in listed.items()} == {
        rule.name: {role.value: rule.grants[role].value for role in Role} for rule in RULES.values()
    }
    shown = local("authority", "jobs.cancel", "--role", "owner").out
    assert "OWNER" in shown
    assert "owner (own), control-plane, submitter (own)" in " ".join(shown.split())
    assert "jobs.create" not in shown
    assert "nobody" in local("authority", "jobs.delete").out


@pytest.mark.parametrize(
    "arguments, says",
    [(["jobs.cancle"], "perhaps you mean jobs.cancel"), (["--role", "ownr"], "perhaps you mean owner")],
)
def test_unknown_rule_or_role_names_the_nearest(local: Terminal, arguments: list[str], says: str):
    answer = local("authority", *arguments)
    assert (answer.code, says in answer.err) == (2, True)
