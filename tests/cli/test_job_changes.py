"""`trellis jobs cancel|discard|run-now|prioritize`, on a ledger and through a gateway."""

import asyncio
from itertools import count

import pytest

from tests.cli.conftest import Terminal
from trellis.cli import job_changes
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, Claim, ClaimId, Turn, TypeClaim
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.operations.job_changes import JobChanges


def states(local: Terminal, type_: str) -> list[str]:
    return [job["status"] for job in local("jobs", "--type", type_, "--json").records][::-1]


def test_jobs_of_a_filter_are_counted_asked_about_and_cancelled(trellis: Terminal):
    jobs = [trellis.submit("mail") for _ in range(3)]
    other = trellis.submit("other")
    seen = trellis("jobs", "cancel", "--type", "mail", "--dry-run", "--json").record
    assert (seen["matched"], [one["job_id"] for one in seen["examples"]]) == (3, jobs)
    refused = trellis("jobs", "cancel", "--type", "mail")
    assert refused.code == 2
    assert refused.err == "error: 3 jobs would be cancelled: say --yes to do it, --dry-run to count only.\n"
    assert states(trellis, "mail") == ["queued"] * 3
    done = trellis("jobs", "cancel", "--type", "mail", "--yes", "--cause", "a mistake")
    assert (done.code, done.out) == (0, "3 jobs cancelled\n")
    assert states(trellis, "mail") == ["cancelled"] * 3
    assert states(trellis, "other") == ["queued"], other
    assert trellis("jobs", "cancel", "--type", "mail", "--yes").out.startswith("No job is like that")


def test_a_preview_counts_no_more_than_the_limit_lets_change(local: Terminal):
    jobs = [local.submit("mail") for _ in range(3)]
    seen = local("jobs", "cancel", "--type", "mail", "--limit", "2", "--dry-run").out
    assert seen.startswith("2 of 3 jobs would be cancelled; the oldest:\n")
    assert [job in seen for job in jobs] == [True, True, False]
    assert local("jobs", "cancel", "--type", "mail", "--limit", "3", "--dry-run").out.startswith("3 jobs would be")
    assert "error: 2 of 3 jobs would be" in local("jobs", "cancel", "--type", "mail", "--limit", "2").err


def test_a_change_of_nothing_has_the_json_of_a_change(local: Terminal):
    local.submit("mail")
    done = local("jobs", "cancel", "--type", "mail", "--yes", "--json").record
    nothing = local("jobs", "cancel", "--type", "mail", "--yes", "--json").record
    assert (done["changed"], nothing) == (1, {**done, "changed": 0})
    assert local("jobs", "cancel", "--type", "mail", "--dry-run", "--json").record["matched"] == 0


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ("cancel", "--status", "succeeded"),
            "jobs that have ended cannot be cancelled; choose one of assigned, queued,",
        ),
        (("discard", "--status", "running"), "running jobs cannot be discarded; choose one of dead_lettered, failed."),
        (("discard", "--status", "succeeded"), "succeeded jobs cannot be discarded; choose one of"),
    ],
)
def test_a_status_that_cannot_be_changed_so_is_refused_with_the_reason(
    local: Terminal, options: tuple[str, ...], says: str
):
    refused = local("jobs", *options, "--dry-run")
    assert (refused.code, says in refused.err, "did you mean" in refused.err) == (2, True, False), refused.err


def test_the_other_changes_take_filters_and_single_jobs(trellis: Terminal):
    delayed = [trellis.submit("mail", "--delay", "1h") for _ in range(3)]
    assert trellis("job", "run-now", delayed[0]).out == f"{delayed[0]} was made ready; it is queued\n"
    again = trellis("job", "run-now", delayed[0])
    assert (again.code, again.err) == (
        1,
        f"error: {delayed[0]} stays as it is, queued: it does not wait for its time\n",
    )
    assert trellis("jobs", "run-now", "--type", "mail", "--yes").out == "2 jobs made ready\n"
    assert trellis("job", "prioritize", delayed[0], "critical").code == 0
    more = trellis("jobs", "prioritize", "critical", "--all", "--limit", "1", "--yes")
    assert (more.out, more.err) == (
        "1 job given another priority\n",
        "--limit 1 ended it; repeat the command for the rest\n",
    )
    ready = trellis("jobs", "prioritize", "critical", "--submitted-after", "1h", "--yes", "--json").record
    assert (ready["changed"], ready["skipped"]) == (1, 0)
    assert trellis("job", "dead-letter", delayed[0], "--cause", "no").code == 0
    assert trellis("jobs", "discard", "--reason", "policy_violation", "--yes").out == "1 job discarded\n"
    assert trellis("dlq", "--json").records == []
    assert trellis("job", "requeue", delayed[0]).code == 0


def test_ids_and_filters_exclude_each_other_and_nothing_is_not_everything(local: Terminal):
    for options in ((), ("a", "--type", "mail"), ("a", "--dry-run")):
        refused = local("jobs", "cancel", *options)
        assert refused.code == 2
        assert "Name jobs, or filter with --type" in refused.err
    assert "choose one of critical, interactive, batch" in local("jobs", "prioritize", "high", "--all").err
    assert (
        "submitted_before"
        in local("jobs", "cancel", "--submitted-before", "2h", "--submitted-after", "1h", "--yes").err
    )


def test_a_job_that_is_claimed_between_the_count_and_the_change_is_skipped(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    _, job_id = local.submit("mail"), local.submit("mail")
    page, claims = JobChanges._page, count()

    async def claimed_meanwhile(self: JobChanges, *args: object) -> object:
        found = await page(self, *args)  # type: ignore[arg-type]
        claim = Claim(claim_id=ClaimId(str(next(claims))), types=(TypeClaim(type="mail"),))
        ledger = await open_ledger(local.url)
        await ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="w"), claim=claim))
        await ledger.close()
        return found

    monkeypatch.setattr(JobChanges, "_page", claimed_meanwhile)
    done = local("jobs", "cancel", "--status", "queued", "--type", "mail", "--yes")
    assert done.out == "0 jobs cancelled, 1 skipped\n"
    assert done.err == f"{job_id} was skipped: the job has version 3, not 1\n"


def test_a_change_that_was_interrupted_goes_on_with_the_rest(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    for _ in range(5):
        local.submit("mail")
    monkeypatch.setattr(job_changes, "CHANGED_MAX", 2)
    change, calls = JobChanges.change_batch, list[int]()

    async def lost(self: JobChanges, *args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise LedgerUnavailable(reason="somebody pulled the plug")
        return await change(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(JobChanges, "change_batch", lost)
    assert local("jobs", "cancel", "--type", "mail", "--yes").code != 0
    assert states(local, "mail") == ["cancelled"] * 2 + ["queued"] * 3
    assert local("jobs", "cancel", "--type", "mail", "--yes").out == "3 jobs cancelled\n"
    assert states(local, "mail") == ["cancelled"] * 5


def test_a_change_that_is_stopped_says_how_to_go_on(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    local.submit("mail")

    async def stopped(*_: object, **__: object) -> object:
        raise asyncio.CancelledError

    monkeypatch.setattr(JobChanges, "change_batch", stopped)
    with pytest.raises(asyncio.CancelledError):
        local("jobs", "cancel", "--type", "mail", "--yes")
