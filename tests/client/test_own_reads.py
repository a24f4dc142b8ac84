"""Every method of the ledger port is decided for a token that is limited to its own jobs."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from trellis.auth.own_reads import OwnReads
from trellis.auth.principals import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

REFUSED_READS = MappingProxyType(
    {
        "the jobs that a change selects, of which `operations/job_changes.py` takes the own ones": "select_jobs",
        "the state of the whole system": "queues workers followers declared_types home_issuer count_events key_limit "
        "sample_events figures connections ping",
        "alerts, and what their conditions read": "alerts alert alert_mark waiting_types stage_steps",
        "jobs and leases of everybody, for services and holders": "children peek_ready holds expiring read_journal journal_entries "
        "recorded job_signals outcomes",
        "checks of the whole ledger": "histories keys_over unpaired inspect",
        "the acts of operators": "acts audit_head plan_retention",
        "schedules, which fire for everybody": "schedules due_schedules",
        "answers to earlier requests": "find_by_idempotency_key find_request",
        "waiting for hints about everybody's jobs": "wait_for_work events_mark wait_for_events feed_end",
    }
)
"""Reads that OwnReads refuses on purpose, by what they show."""
WRITES = MappingProxyType(
    {
        "jobs": "submit turn renew move cancel requeue save_checkpoint journal signal sweep retain restore annotate "
        "spawn submit_batch send_signal change_jobs",
        "types and keys": "pause limit_rate declare_types limit_key limit_held",
        "schedules": "save_schedule remove_schedule advance_schedule",
        "subscriptions": "subscribe ack unsubscribe release_retention",
        "administration": "set_home_issuer record_act restore_acts acts_published observe_alerts extend_audit_chain "
        "heartbeat_worker close",
    }
)
"""Methods that change or close the ledger, by what they change."""


def methods(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


def names(lists: Mapping[str, str]) -> list[str]:
    return [name for listed in lists.values() for name in listed.split()]


@pytest.mark.requirement("D62")
def test_every_read_of_the_ledger_is_given_for_own_jobs_or_refused_on_purpose():
    decided = [*methods(OwnReads), *names(REFUSED_READS), *names(WRITES)]
    undecided = methods(Ledger) - set(decided)
    assert not undecided, "define each in OwnReads, or refuse it in the list above"
    assert sorted(decided) == sorted(methods(Ledger)), "each is decided once, and exists"


@pytest.mark.requirement("D62")
async def test_ledger_read_that_is_not_listed_is_refused():
    ledger = await open_ledger("sqlite:///:memory:")
    try:
        reads = OwnReads(
            ledger=ledger, principal=Principal(name="ada", roles=frozenset({Role.SUBMITTER}), by_token=True)
        )
        for name in names(REFUSED_READS) + names(WRITES):
            with pytest.raises(NotAllowed, match="own jobs only"):
                getattr(reads, name)
    finally:
        await ledger.close()
