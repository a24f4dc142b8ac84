"""What the file refuses to anybody with a SQL prompt, each refusal with the guard that makes it.

For each there is the mutant: without that guard the same statement goes through, so the test can fail.
"""

import shutil
from pathlib import Path

import pytest

from tests.ledgers.sqlite.shell import Shell
from trellis.ledgers.sqlite.connection import SqliteTarget
from trellis.ledgers.sqlite.schema import migrate
from trellis.lifecycles import LIFECYCLES, event_code

KEY = "INSERT INTO trellis_concurrency_key (id, name, slots) VALUES (1, 'k', 1), (2, 'two', 2)"
EVENT = "INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait)"
CLAIMED = event_code("job_claimed")
RATED = (  # one claim a second of each key
    "INSERT OR IGNORE INTO trellis_job_type (id, lifecycle, name) VALUES (1, 4, 'work'); INSERT INTO trellis_type_options"
    " (lifecycle, name, prio, max_attempts, max_deaths, concurrency_limit, keyed, changed_by, changed_at, rate_per_key, burst_per_key)"
    " SELECT lifecycle, name, 2, 5, 3, 1, 0, 1, 0, 1.0, 2 FROM trellis_job_type WHERE id = 1;"
)
TRANSITION = "trellis_event_is_the_transition"
MOVES = "trellis_job_moves_with_its_event"
FITS = "trellis_job_place_fits"
FINALIZES = "trellis_event_finalizes"
COMPLETES = f"{EVENT} VALUES (9, 6, 4, 5, 6, 3, 1, 9, 0, 0, 0, 5, NULL)"

RESTORING = "INSERT INTO trellis_meta VALUES ('restoring', 1)"
NEW_ARTIFACT = "INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts) VALUES (99, 8, 1, 0, 5)"
ASKED = "INSERT INTO trellis_submission (id, job_id, created_at, max_attempts, max_deaths, payload, parent)"
SUBMITTED = f"{ASKED} VALUES (99, 'again', 0, 5, 2, x'7b7d',"
FINAL_AGAIN = (
    f"INSERT INTO trellis_restoring VALUES (99); {EVENT}"
    f" VALUES (99, 1, {event_code('artifact.staged')}, 0, 1, 4, 1, 0, 0, 0, 0, 2, NULL),"
    f" (99, 2, {event_code('artifact.finalized')}, 1, 2, 3, 1, 0, 0, 0, 0, 2, NULL)"
)
QUEUE_STEPS = ("job_accepted", "job_queued", "job_claimed", "job_nlm_called", "job_artifact_writing")
WRITES_AGAIN = (  # a queue job 98 that writes its artifact 97
    "INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts) VALUES (97, 8, 1, 0, 5), (98, 2, 1, 0, 5);"
    f"{ASKED} VALUES (98, 'raw-98', 0, 5, 2, x'7b7d', NULL), (97, 'raw-97', 0, 5, 2, x'7b7d', 'raw-98');"
    f"{EVENT} VALUES (97, 1, {event_code('artifact.staged')}, 0, 1, 4, 1, 0, 0, 0, 0, 2, NULL);"
) + ";".join(
    f"{EVENT} VALUES (98, {n + 1}, {event_code(step)}, {n}, {n + 1}, 3, 1, {9 * (n > 1)}, 0, 0, 0,"
    f" {(2, 1, 4, 4, 4)[n]}, {'NULL' if n < 2 else 31})"
    for n, step in enumerate(QUEUE_STEPS)
)

# Jobs of `furnished`: 1 queued, 2 running, 3 succeeded, 4 dead-lettered, 5 ready with the slot of key k, 6 parked
# behind it, 7 a run that lost nothing yet, 8 failed, 9 a queue job that writes its artifact 10,
# 11 an artifact of another, 12 a queue job that completed with 13. Roles: 3 orchestrator, 6 control-plane, 9 worker, 10 submitter, 15 sweeper.
REFUSED = {
    "a state without its event": (MOVES, "UPDATE trellis_job SET state = 2 WHERE id = 1", "only by its event"),
    "a version without its event": (MOVES, "UPDATE trellis_job SET version = 2 WHERE id = 1", "only by its event"),
    "an attempt without its event": (MOVES, "UPDATE trellis_job SET attempt = 1 WHERE id = 1", "only by its event"),
    "a generation without its event": (
        MOVES,
        "UPDATE trellis_job SET generation = 1 WHERE id = 1",
        "only by its event",
    ),
    "a step back": (MOVES, "UPDATE trellis_job SET state = 1, version = 2 WHERE id = 2", "only by its event"),
    "a change to an ended job": (
        MOVES,
        "UPDATE trellis_job SET state = 1, version = version + 1 WHERE id = 3",
        "only by its event",
    ),
    "a version gap": (MOVES, f"{EVENT} VALUES (1, 3, 6, 1, 6, 6, 1, 9, 0, 0, 0, 6, NULL)", "version gap"),
    "a second event for a version": (None, f"{EVENT} VALUES (1, 1, 6, 1, 6, 6, 1, 9, 0, 0, 0, 6, NULL)", None),
    "an event that leaves another state": (
        MOVES,
        f"{EVENT} VALUES (1, 2, 4, 3, 4, 9, 1, 0, 0, 0, 0, 5, NULL)",
        "not in the state",
    ),
    "an event of no job": (TRANSITION, f"{EVENT} VALUES (99, 1, 1, 0, 1, 10, 1, 0, 0, 0, 0, 1, NULL)", "no such job"),
    "an undeclared step out of an ended state": (
        MOVES,
        f"{EVENT} VALUES (3, 5, 13, 4, 1, 6, 1, 9, 1, 0, 0, 1, NULL)",
        "not declared",
    ),
    "a retry in the same attempt": (
        MOVES,
        f"{EVENT} VALUES (2, 4, 9, 3, 1, 9, 1, 9, 0, 0, 0, 1, NULL)",
        "progress",
    ),
    "a success in the next attempt": (
        MOVES,
        f"{EVENT} VALUES (2, 4, 4, 3, 4, 9, 1, 9, 0, 1, 0, 5, NULL)",
        "progress",
    ),
    "a requeue in the same generation": (
        MOVES,
        f"{EVENT} VALUES (8, 5, 13, 5, 1, 6, 1, 9, 0, 0, 0, 1, NULL)",
        "progress",
    ),
    "a requeue that keeps the attempt": (
        MOVES,
        f"{EVENT} VALUES (8, 5, 13, 5, 1, 6, 1, 9, 1, 1, 0, 1, NULL)",
        "progress",
    ),
    "a dead letter state without its letter": (
        MOVES,
        f"{EVENT} VALUES (2, 4, 7, 3, 7, 9, 1, 9, 0, 0, 0, 6, NULL)",
        "dead letter is required",
    ),
    "an ended state in the place of the ready": (
        MOVES,
        f"{EVENT} VALUES (2, 4, 4, 3, 4, 9, 1, 9, 0, 0, 0, 1, NULL)",
        "place does not fit",
    ),
    "a claim that keeps the epoch": (
        MOVES,
        f"{EVENT} VALUES (1, 2, 2, 1, 2, 9, 1, 1, 0, 0, 0, 4, 1000)",
        "epoch must rise",
    ),
    "an event with an older epoch": (
        MOVES,
        f"{EVENT} VALUES (2, 4, 4, 3, 4, 9, 1, 0, 0, 0, 0, 5, NULL)",
        "never fall",
    ),
    "a lease without an end": (  # without the other guard, a constraint refuses it with other words
        TRANSITION,
        f"{EVENT} VALUES (1, 2, 2, 1, 2, 9, 1, 9, 0, 0, 0, 4, NULL)",
        "needs a length",
    ),
    "an event put before others": (
        MOVES,
        (
            "INSERT INTO trellis_event (seq, job, version, type, source, target, role, actor, epoch, generation, attempt, at,"
            " place) VALUES (-5, 1, 2, 6, 1, 6, 6, 1, 9, 0, 0, 0, 6)"
        ),
        "appended",
    ),
    "an event replaced by another of its job": (
        FINALIZES,
        (
            "INSERT OR REPLACE INTO trellis_event (seq, job, version, type, source, target, role, actor, epoch, generation,"
            " attempt, at, place) SELECT max(seq), 1, 2, 6, 1, 6, 6, 1, 9, 0, 0, 0, 6 FROM trellis_event"
        ),
        "never replaced",
    ),
    "an administrative act changed": (
        "trellis_act_stays_as_it_is",
        (
            "INSERT INTO trellis_act (id, at, role, actor, event, subject) VALUES ('act-1', 0, 6, 1, 'x', 'y');"
            " UPDATE trellis_act SET actor = 2"
        ),
        "never changes",
    ),
    "an event changed": (
        "trellis_event_never_changes",
        "UPDATE trellis_event SET cause = 'x' WHERE job = 1",
        "never changes",
    ),
    "an event removed": ("trellis_event_stays", "DELETE FROM trellis_event WHERE job = 1", "only with its job"),
    "an epoch that falls": (FITS, "UPDATE trellis_job SET epoch = 0 WHERE id = 2", "never falls"),
    "a lease taken without an event": (
        FITS,
        "UPDATE trellis_job SET place = 4, epoch = epoch + 1, until = 1, length = 1, owner = 1 WHERE id = 1",
        "place does not fit",
    ),
    "a lease ended without an event": (
        FITS,
        "UPDATE trellis_job SET place = 1, epoch = epoch + 1 WHERE id = 2",
        "does not fit",
    ),
    "a lease lost without a new epoch": (FITS, "UPDATE trellis_job SET place = 1 WHERE id = 7", "raise the epoch"),
    "an ended job made claimable": (FITS, "UPDATE trellis_job SET place = 1 WHERE id = 3", "does not fit"),
    "a claim that the rate of the key does not allow": (
        "trellis_lease_takes_a_token",
        f"{RATED} INSERT INTO trellis_key_rate VALUES (1, 1, 1000001); {EVENT} VALUES (5, 2, {CLAIMED}, 1, 2, 9, 1, 9, 0, 0, 0, 4, 31)",
        "the rate of the concurrency key",
    ),
    "a slot beyond the limit": (FITS, "UPDATE trellis_job SET place = 1, slot = 1 WHERE id = 6", "at its limit"),
    "a slot that is taken": (None, "UPDATE trellis_job SET place = 1, slot = 0 WHERE id = 6", None),
    "a slot torn from its owner": (
        FITS,
        "UPDATE OR REPLACE trellis_job SET place = 1, slot = 0 WHERE id = 6",
        "slot taken",
    ),
    "a keyed job ready without a slot": (None, "UPDATE trellis_job SET place = 1 WHERE id = 6", "CHECK"),
    "a keyed job parked with a slot": (None, "UPDATE trellis_job SET place = 3 WHERE id = 5", "CHECK"),
    "a job of another key": (
        "trellis_job_identity_never_changes",
        "UPDATE trellis_job SET ckey = 2 WHERE id = 6",
        "never changes",
    ),
    "a job of another lifecycle": (
        "trellis_job_identity_never_changes",
        "UPDATE trellis_job SET lifecycle = 1 WHERE id = 1",
        "never changes",
    ),
    "a job removed": ("trellis_job_stays", "DELETE FROM trellis_job WHERE id = 1", "only through purge"),
    "a job replaced": (
        "trellis_job_begins_unsubmitted",
        "INSERT OR REPLACE INTO trellis_job (id, lifecycle, type, prio, max_attempts) VALUES (2, 4, 1, 0, 5)",
        "begins without a state",
    ),
    "a job born in a state": (
        "trellis_job_begins_unsubmitted",
        "INSERT INTO trellis_job (lifecycle, type, prio, max_attempts, state, version, place) VALUES (4, 1, 0, 5, 1, 1, 1)",
        "begins without a state",
    ),
    "a job born behind its events": (
        "trellis_job_begins_unsubmitted",
        "INSERT INTO trellis_job (lifecycle, type, prio, max_attempts, seq) VALUES (4, 1, 0, 5, -9)",
        "begins without a state",
    ),
    "a submission changed": (
        "trellis_submission_never_changes",
        "UPDATE trellis_submission SET payload = x'00'",
        "never changes",
    ),
    "a submission replaced": (
        "trellis_submission_is_new",
        (
            "INSERT OR REPLACE INTO trellis_submission (job_id, created_at, max_attempts, max_deaths, payload)"
            " VALUES ('raw-1', 0, 1, 1, x'00')"
        ),
        "never replaced",
    ),
    "a submission removed": (
        "trellis_submission_stays",
        "DELETE FROM trellis_submission WHERE id = 1",
        "only with its job",
    ),
    "a dead letter of a step already made": (
        "trellis_dead_letter_precedes_its_event",
        "INSERT INTO trellis_dead_letter VALUES (3, 1, 'timeout', 'exec', 'x', 1, NULL, NULL, 0)",
        "about to be made",
    ),
    "a dead letter without an error": (
        None,
        "INSERT INTO trellis_dead_letter VALUES (1, 2, 'timeout', 'exec', '', 1, NULL, NULL, 0)",
        "CHECK",
    ),
    "a dead letter with an unknown reason": (
        None,
        "INSERT INTO trellis_dead_letter VALUES (1, 2, 'bad luck', 'exec', 'x', 1, NULL, NULL, 0)",
        "CHECK",
    ),
    "a dead letter with an owner and no lease end": (
        None,
        "INSERT INTO trellis_dead_letter VALUES (1, 2, 'timeout', 'exec', 'x', 1, 'w', NULL, 0)",
        "CHECK",
    ),
    "a dead letter changed": (
        "trellis_dead_letter_never_changes",
        "UPDATE trellis_dead_letter SET last_error = 'y'",
        "never changes",
    ),
    "a dead letter removed": ("trellis_dead_letter_stays", "DELETE FROM trellis_dead_letter", "only with its job"),
    "a living job purged": (
        "trellis_purge_is_of_ended_jobs",
        "INSERT INTO trellis_purge VALUES (1)",
        "only an ended job",
    ),
    "a transition declared by hand": (
        "trellis_arrow_is_contract_i",
        "INSERT INTO trellis_arrow VALUES (1, 65535, 0, 0, 255, 0, 0)",
        "declared in code",
    ),
    "a role let in by hand": (
        "trellis_arrow_is_contract_u",
        "UPDATE trellis_arrow SET roles = 65535",
        "declared in code",
    ),
    "a transition withdrawn by hand": ("trellis_arrow_is_contract_d", "DELETE FROM trellis_arrow", "declared in code"),
    "a state changed by hand": (
        "trellis_state_is_contract_u",
        "UPDATE trellis_state SET places = 255",
        "declared in code",
    ),
    "a state added by hand": (
        "trellis_state_is_contract_i",
        "INSERT INTO trellis_state VALUES (255, 15, 'x', 0, 0, 255, 0)",
        "declared in code",
    ),
    "a completion that names no artifact": (FINALIZES, COMPLETES, "only with a staged artifact of its own"),
    "a completion with an artifact of another": (
        FINALIZES,
        f"INSERT INTO trellis_finalizing VALUES (9, 11); {COMPLETES}",
        "only with a staged artifact of its own",
    ),
    "an artifact finalized without its job": (
        FINALIZES,
        f"{EVENT} VALUES (10, 2, {event_code('artifact.finalized')}, 1, 2, 3, 1, 9, 0, 0, 0, 2, NULL)",
        "only by the completion of its job",
    ),
    "an artifact finalized by hand while its job is named": (
        FINALIZES,
        (
            "INSERT INTO trellis_finalizing VALUES (9, 10);"
            f"{EVENT} VALUES (10, 2, {event_code('artifact.finalized')}, 1, 2, 3, 1, 9, 0, 0, 0, 2, NULL)"
        ),
        "only by the completion of its job",
    ),
    "a living job said to come back": (
        "trellis_restoring_is_of_new_jobs",
        f"{RESTORING}; INSERT INTO trellis_restoring VALUES (9)",
        "without events",
    ),
    "a new job said to come back by hand": (
        "trellis_restoring_is_of_new_jobs",
        f"{NEW_ARTIFACT}; INSERT INTO trellis_restoring VALUES (99)",
        "by a restore",
    ),
    "an artifact that comes back final while its job lives": (
        FINALIZES,
        f"{RESTORING}; {NEW_ARTIFACT}; {SUBMITTED} 'raw-9'); {FINAL_AGAIN}",
        "has not completed",
    ),
    "a second final artifact that comes back": (
        FINALIZES,
        f"{RESTORING}; {NEW_ARTIFACT}; {SUBMITTED} 'raw-12'); {FINAL_AGAIN}",
        "another artifact of the job is final",
    ),
    "a final artifact of nobody": (
        FINALIZES,
        f"{RESTORING}; {NEW_ARTIFACT}; {SUBMITTED} NULL); {FINAL_AGAIN}",
        "belongs to a job",
    ),
    "a final artifact whose job is said later": (
        FINALIZES,
        f"{RESTORING}; {NEW_ARTIFACT}; {FINAL_AGAIN}; {SUBMITTED} 'raw-9')",
        "belongs to a job",
    ),
    "a second completion in the name of one that lost its job": (
        FINALIZES,
        (
            f"{RESTORING}; {NEW_ARTIFACT}; {SUBMITTED} 'raw-98'); {FINAL_AGAIN}; {WRITES_AGAIN};"
            "INSERT INTO trellis_finalizing VALUES (98, 97);"
            f"{EVENT} VALUES (98, 6, 4, 5, 6, 3, 1, 9, 0, 0, 0, 5, NULL)"
        ),
        "another artifact of the job is final",
    ),
    "a living job put in the place of one that comes back": (
        "trellis_restoring_stays_with_its_job",
        (
            f"{RESTORING}; {NEW_ARTIFACT};"
            "INSERT INTO trellis_restoring VALUES (99); UPDATE trellis_restoring SET job = 9"
        ),
        "without events",
    ),
    "a pair of steps declared by hand": (
        "trellis_finalizer_is_contract_i",
        "INSERT INTO trellis_finalizer VALUES (1, 2, 1, 1, 1, 1)",
        "declared in code",
    ),
    "a pair of steps changed by hand": (
        "trellis_finalizer_is_contract_u",
        "UPDATE trellis_finalizer SET lifecycle = 0",
        "declared in code",
    ),
    "a pair of steps withdrawn by hand": (
        "trellis_finalizer_is_contract_d",
        "DELETE FROM trellis_finalizer",
        "declared in code",
    ),
    "a state withdrawn by hand": ("trellis_state_is_contract_d", "DELETE FROM trellis_state", "declared in code"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job in each situation the statements are about."""
    path = tmp_path_factory.mktemp("furnished") / "ledger.db"
    migrate(SqliteTarget(url=f"sqlite:///{path}", path=path))
    shell = Shell(path)
    shell.db.execute(KEY)
    for state in ("queued", "running", "succeeded", "dead_lettered"):
        shell.job_in("leased-job", state)
    for _ in range(2):
        parked_job(shell, 1)
    shell.db.execute("UPDATE trellis_job SET place = 1, slot = 0 WHERE id = 5")
    shell.job_in("run", "running")
    shell.job_in("leased-job", "failed")
    shell.staged(shell.job_in("queue-job", "ARTIFACT_WRITE"))
    shell.staged(1)
    shell.job_in("queue-job", "COMPLETE")
    shell.db.close()
    return path


@pytest.fixture
def furnished(template: Path, path: Path) -> Shell:
    shutil.copy(template, path)
    return Shell(path)


def parked_job(shell: Shell, key: int) -> int:
    job = shell.new_job(LIFECYCLES["leased-job"], key=key)
    shell.db.execute(f"{EVENT} VALUES (?, 1, 1, 0, 1, 10, 1, 0, 0, 0, 0, 3, NULL)", (job,))
    return job


@pytest.mark.requirement("D55", "D1", "DJ-3")
@pytest.mark.parametrize("what", REFUSED)
def test_the_sqlite_file_refuses_forged_writes(furnished: Shell, what: str):
    _, statement, words = REFUSED[what]
    before = furnished.dump()
    refusal = furnished.refusal(statement)
    assert refusal is not None, f"{what} went through"
    assert words is None or words in refusal
    assert furnished.dump() == before


@pytest.mark.parametrize("what", [what for what, (guard, _, _) in REFUSED.items() if guard is not None])
def test_without_its_guard_it_would_go_through(furnished: Shell, what: str):
    guards, statement, _ = REFUSED[what]
    for guard in [guards] if isinstance(guards, str) else guards:
        furnished.db.execute(f"DROP TRIGGER {guard}")
    assert furnished.refusal(statement) is None


@pytest.mark.requirement("D49", "JQ-7")
def test_taken_slots_above_a_lowered_key_limit_count_against_it(shell: Shell):
    shell.db.execute("INSERT INTO trellis_concurrency_key (id, name, slots) VALUES (1, 'k', 3)")
    jobs = [parked_job(shell, 1) for _ in range(4)]
    for slot, job in ((1, jobs[0]), (2, jobs[1])):
        shell.db.execute("UPDATE trellis_job SET place = 1, slot = ? WHERE id = ?", (slot, job))
    shell.db.execute("UPDATE trellis_concurrency_key SET slots = 2")
    refusal = shell.refusal("UPDATE trellis_job SET place = 1, slot = 0 WHERE id = ?", jobs[2])
    assert refusal is not None
    assert "at its limit" in refusal
    shell.db.execute("UPDATE trellis_job SET place = 3, slot = NULL WHERE id = ?", (jobs[1],))
    assert shell.refusal("UPDATE trellis_job SET place = 1, slot = 0 WHERE id = ?", jobs[2]) is None


@pytest.mark.requirement("D61")
def test_purging_an_ended_job_takes_all_of_it_and_nothing_else(furnished: Shell):
    furnished.db.execute("INSERT INTO trellis_kept VALUES (3, 0)")
    furnished.db.execute("INSERT INTO trellis_purge VALUES (3)")
    mine = {"trellis_job": "id", "trellis_submission": "id", "trellis_event": "job", "trellis_kept": "job"}
    for table, column in mine.items():
        assert furnished.rows(f"SELECT 1 FROM {table} WHERE {column} = 3") == []
    assert furnished.value("SELECT count(*) FROM trellis_job") == 12
    assert furnished.value("SELECT count(*) FROM trellis_purge") == 0


@pytest.mark.requirement("D6")
def test_a_feed_position_is_never_given_out_twice(shell: Shell):
    first = shell.job_in("leased-job", "succeeded")
    newest = shell.value("SELECT max(seq) FROM trellis_event")
    shell.db.execute("INSERT INTO trellis_purge VALUES (?)", (first,))
    assert shell.value("SELECT count(*) FROM trellis_event") == 0
    shell.job_in("leased-job", "queued")
    assert shell.value("SELECT min(seq) FROM trellis_event") > newest


@pytest.mark.requirement("D6")
def test_a_position_of_a_rolled_back_event_was_never_seen(shell: Shell, path: Path):
    shell.job_in("leased-job", "queued")
    seen = Shell(path)
    shell.db.execute("BEGIN IMMEDIATE")
    shell.job_in("leased-job", "queued")
    assert seen.value("SELECT count(*) FROM trellis_event") == 1
    shell.db.execute("ROLLBACK")
    shell.job_in("leased-job", "running")
    assert seen.rows("SELECT seq FROM trellis_event ORDER BY seq") == [(1,), (2,), (3,), (4,)]


def test_every_guard_of_the_schema_is_tried_here(shell: Shell):
    made = {name for (name,) in shell.rows("SELECT name FROM sqlite_schema WHERE type = 'trigger'")}
    tried = {name for guard, _, _ in REFUSED.values() for name in ([guard] if isinstance(guard, str) else guard or [])}
    of_purge = {
        "trellis_purge_removes",
        "trellis_purge_removes_the_wish",
        "trellis_purge_removes_waits",
        "trellis_purge_forgets_the_kept",
        "trellis_purge_removes_unique_key",
        "trellis_key_takes_its_rates_along",
    }
    assert made - tried == of_purge


def test_a_claim_by_hand_takes_a_token_of_its_key(furnished: Shell):
    claim = f"{EVENT} VALUES (5, 2, {CLAIMED}, 1, 2, 9, 1, 9, 0, 0, 0, 4, 31)"
    furnished.db.execute(f"{RATED} {claim}")
    assert furnished.rows("SELECT key, type, used_until FROM trellis_key_rate") == [(1, 1, 1_000_000)]


async def test_leftovers_of_a_restore_are_removed_when_a_ledger_is_opened(shell: Shell, reopen):
    shell.db.execute(f"{RESTORING}; {NEW_ARTIFACT}; INSERT INTO trellis_restoring VALUES (99)")
    await reopen()
    assert shell.rows("SELECT * FROM trellis_restoring") == []
    assert shell.refusal("INSERT INTO trellis_restoring VALUES (99)") is not None
