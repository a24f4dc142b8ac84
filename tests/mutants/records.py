"""Mutants of what each ledger records on its own account: causes of events, stages and reasons of dead letters.

And of rules that SQLite's ledger decides beside those of the families' own tables.
"""

from tests.mutants.mutant import Mutant

LEDGER = "tests/ledgers/conformance"
SQL = "ledgers/postgres/functions"
DECIDE = "engine/decide.py"
SWEEP = "ledgers/sqlite/sweep.py"
SWEEP_SQL = f"{SQL}/80_sweep.sql"

LOST = f"{LEDGER}/test_sweep.py::test_a_lost_lease_opens_the_next_attempt"
SPENT = f"{LEDGER}/test_sweep.py::test_a_lost_lease_without_attempts_left_is_dead_lettered"
DIED = f"{LEDGER}/test_sweep.py::test_a_payload_that_kills_its_worker_twice_is_dead_lettered"
LATE = f"{LEDGER}/test_parity.py::test_a_deadline_names_the_stage_it_found"
TIMEOUT = f"{LEDGER}/test_sweep.py::test_a_passed_deadline_dead_letters_with_timeout"
TIMER = f"{LEDGER}/test_parity.py::test_a_timer_that_ends_a_job_says_why_and_counts_as_exhausted"
CANCELLED = f"{LEDGER}/test_parity.py::test_a_soft_cancel_that_is_carried_out_says_why_and_raises_the_epoch"
ASKED = f"{LEDGER}/test_cancel.py::test_cancel_event_names_who_requested_the_soft_cancel"
REJECTED = f"{LEDGER}/test_advance.py::test_a_rejected_job_leaves_a_complete_dead_letter"
COMPENSATION = f"{LEDGER}/test_compensation.py"
ONE_REQUEST = f"{LEDGER}/test_request_keys.py::test_concurrent_different_requests_with_one_key_have_one_effect"
ONLY = f"{LEDGER}/test_claim.py::test_a_claim_that_names_a_job_takes_the_slot_of_an_unclaimed_job_of_its_key"
MOVED = f"{LEDGER}/test_move.py::test_a_move_is_one_transition_with_its_event"
ADVANCED = f"{LEDGER}/test_advance.py::test_each_advance_is_one_transition_with_one_event"
TOGETHER = f"{LEDGER}/test_bus_steps.py::test_results_of_many_jobs_together_leave_each_as_if_it_came_alone"
SUBMITTED = f"{LEDGER}/test_submit.py::test_a_submitted_job_is_in_its_first_state_with_one_event"
STORIES = f"{LEDGER}/test_differential.py::test_both_ledgers_agree_on_random_stories"

MEANWHILE = f"{LEDGER}/test_job_changes.py::test_a_job_that_changed_after_it_was_selected_is_skipped_and_counted"
DISCARDED = f"{LEDGER}/test_job_changes.py::test_discard_takes_dead_letters_off_the_list_and_can_be_undone"

RULES: dict[str, Mutant] = {
    # A change of many jobs takes one that somebody has claimed since it was selected.
    "DJ-11 sqlite many": Mutant(
        file="ledgers/sqlite/job_changes.py",
        old="    if job.version is not None and job.version != row.version:",
        new="    if job.version is not None and job.version > row.version:",
        tests=(f"{MEANWHILE}[sqlite]",),
    ),
    "DJ-11 postgres many": Mutant(
        file=f"{SQL}/71_job_changes.sql",
        old="case when j.version <> (k.t).version then 'version'",
        new="case when j.version > (k.t).version then 'version'",
        tests=(f"{MEANWHILE}[postgres]",),
    ),
    # The dead letter of a discarded job stays in the list.
    "DJ-12 postgres discarded": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="if x.trigger = 'discard' then update dead_letter",
        new="if x.trigger = 'never' then update dead_letter",
        tests=(f"{DISCARDED}[postgres]",),
    ),
    # A key lets one job more be held than its limit says.
    "JQ-7 sqlite": Mutant(
        file="ledgers/sqlite/queries/names.sql",
        old="INSERT INTO trellis_concurrency_key (name, slots) VALUES (?, ?) RETURNING id;",
        new="INSERT INTO trellis_concurrency_key (name, slots) VALUES (?, ? + 1) RETURNING id;",
        tests=(f"{LEDGER}/test_keys.py::test_one_job_of_a_concurrency_key_is_claimed_at_a_time[sqlite]",),
    ),
    # A claim that names its only job waits for the slot of a job that nobody has claimed.
    "JQ-7 sqlite only": Mutant(
        file="ledgers/sqlite/claims.py",
        old="        overtake(tx, row)",
        new="        pass",
        tests=(f"{ONLY}[sqlite]",),
    ),
    "JQ-7 postgres only": Mutant(
        file=f"{SQL}/45_claim.sql",
        old="    perform _overtake(only_id);\n",
        new="",
        tests=(f"{ONLY}[postgres]",),
    ),
    # A role makes the steps of another.
    "DJ-1 sqlite": Mutant(
        file="ledgers/sqlite/migrations/0026_one_look_per_event.sql",
        old="AND a.roles >> e.role & 1 AND",
        new="AND",
        tests=("tests/ledgers/sqlite/test_transitions_by_hand.py::test_exactly_the_declared_steps_pass[leased-job]",),
    ),
    # The database takes an event of an earlier attempt.
    "DJ-3 sqlite": Mutant(
        file="ledgers/sqlite/migrations/0026_one_look_per_event.sql",
        old="AND e.attempt = CASE a.opens WHEN 0 THEN old.attempt WHEN 1 THEN old.attempt + 1 ELSE 0 END\n",
        new="",
        tests=("tests/ledgers/sqlite/test_guards.py::test_the_sqlite_file_refuses_forged_writes",),
    ),
    # A payload kills as many workers as there are.
    "DJ-18 sqlite": Mutant(
        file=SWEEP,
        old="if 0 < max_deaths <= row.deaths + 1:",
        new="if 0 < max_deaths <= row.deaths - 8:",
        tests=(DIED,),
    ),
    # Jobs of a paused type are handed out on the bus.
    "BUS-3 sqlite": Mutant(
        file="ledgers/sqlite/queries/read.sql",
        old="WHERE c.name = w.name AND c.paused)",
        new="WHERE c.name = w.name AND c.paused > 1)",
        tests=(f"{LEDGER}/test_bus_reads.py::test_types_that_are_paused_have_no_heads[sqlite]",),
    ),
    # User code begins under a lease whose time is over.
    "DJ-19 sqlite": Mutant(
        file="ledgers/sqlite/turn.py",
        old="and row.until is not None and row.until <= now)",
        new="and row.until is None)",
        tests=(f"{LEDGER}/test_parity.py::test_a_start_after_the_lease_ran_out_is_refused",),
    ),
    # The checkpoint of a holder that lost its lease reaches the next one.
    "DJ-21 sqlite": Mutant(
        file="ledgers/sqlite/queries/holder.sql",
        old="SELECT version FROM trellis_job WHERE id = ? AND epoch = ? AND place = 4;",
        new="SELECT version FROM trellis_job WHERE id = ? AND ? > 0;",
        tests=(f"{LEDGER}/test_fence.py::test_the_losers_checkpoint_does_not_reach_the_next_holder[sqlite]",),
    ),
}

RECORDS: dict[str, Mutant] = {
    # Two requests that change jobs share one idempotency key.
    "DJ-21 sqlite key": Mutant(
        file="ledgers/sqlite/request_keys.py",
        old="return check_same_request(key, StoredRequest(",
        new="return (lambda _, stored: stored)(key, StoredRequest(",
        tests=(f"{ONE_REQUEST}[sqlite-cancel]",),
    ),
    "DJ-21 postgres key": Mutant(
        file=f"{SQL}/72_request_keys.sql",
        old="if found and stored.fingerprint <> print then",
        new="if found and false then",
        tests=(f"{ONE_REQUEST}[postgres-cancel]",),
    ),
    # A lost lease that opens the next attempt has no cause.
    "DJ-15 expired": Mutant(
        file=DECIDE,
        old="return Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, counts_death=died)",
        new="return Decision(trigger=Trigger.EXPIRE, counts_death=died)",
        tests=(LOST,),
    ),
    "DJ-15 spared": Mutant(
        file=DECIDE,
        old="return Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, spares_attempt=True)",
        new="return Decision(trigger=Trigger.EXPIRE, spares_attempt=True)",
        tests=(LOST,),
    ),
    # A ledger drops the cause, the reason or the stage that was decided.
    "DJ-15 sqlite decided": Mutant(
        file=SWEEP,
        old="revokes=row.place == HELD, cause=cause, data=data)",
        new="revokes=row.place == HELD, data=data)",
        tests=(LOST,),
    ),
    "DJ-15 postgres decided": Mutant(
        file=SWEEP_SQL, old="d.spares_attempt, cause,", new="d.spares_attempt, null,", tests=(LOST,)
    ),
    "DJ-12 sqlite decided": Mutant(
        file=SWEEP,
        old="stage=what.stage, last_error",
        new='stage=type(what.stage)("input"), last_error',
        tests=(SPENT,),
    ),
    "DJ-12 postgres decided": Mutant(
        file=SWEEP_SQL,
        old="null, null, d.reason_code, d.stage, cause);",
        new="null, null, d.reason_code, 'input', cause);",
        tests=(SPENT,),
    ),
    # The text of a cause changes for both ledgers at once.
    "DJ-15 text": Mutant(
        file="lifecycles/events.py",
        old='LEASE_EXPIRED = "lease expired"',
        new='LEASE_EXPIRED = "lease over"',
        tests=(LOST,),
    ),
    # What spent the attempts is called something else in the letter or in the event.
    "DJ-12 spent": Mutant(
        file=DECIDE,
        old="return _end(lifecycle, state, Trigger.EXHAUST, Cause.LEASE_EXPIRED, reason, died=died)",
        new="return _end(lifecycle, state, Trigger.EXHAUST, Cause.ATTEMPTS_SPENT, reason, died=died)",
        tests=(SPENT,),
    ),
    "DJ-12 spent reason": Mutant(
        file=DECIDE,
        old="reason = ReasonCode.EXHAUSTED_RETRIES\n",
        new="reason = ReasonCode.TIMEOUT\n",
        tests=(SPENT,),
    ),
    "DJ-12 spent stage": Mutant(
        file=DECIDE,
        old="at = stage or stage_in(state)",
        new="at = stage or Stage.FETCH",
        tests=(SPENT,),
    ),
    # What workers died of is called something else, or counted wrong.
    "DJ-12 died": Mutant(
        file=DECIDE,
        old="Cause.WORKER_DIED_ONCE if Fact.FIRST_DEATH in facts else Cause.WORKER_DIED",
        new="Cause.WORKER_DIED_ONCE",
        tests=(DIED,),
    ),
    "DJ-12 died reason": Mutant(
        file=DECIDE,
        old="ReasonCode.INFRASTRUCTURE_FAILURE",
        new="ReasonCode.EXHAUSTED_RETRIES",
        tests=(DIED,),
    ),
    "DJ-12 sqlite died": Mutant(
        file=SWEEP, old="what.cause_after(row.deaths + 1)", new="what.cause_after(row.deaths)", tests=(DIED,)
    ),
    "DJ-12 postgres died": Mutant(
        file=SWEEP_SQL,
        old="replace(d.cause, '%s', t.deaths::text)",
        new="replace(d.cause, '%s', l.deaths::text)",
        tests=(DIED,),
    ),
    # A passed deadline is recorded as something else.
    "DJ-15 deadline": Mutant(
        file=DECIDE,
        old="Trigger.DEADLINE, Cause.DEADLINE_PASSED, ReasonCode.TIMEOUT)",
        new="Trigger.DEADLINE, Cause.ATTEMPTS_SPENT, ReasonCode.TIMEOUT)",
        tests=(LATE,),
    ),
    "DJ-12 deadline reason": Mutant(
        file=DECIDE,
        old="Trigger.DEADLINE, Cause.DEADLINE_PASSED, ReasonCode.TIMEOUT)",
        new="Trigger.DEADLINE, Cause.DEADLINE_PASSED, ReasonCode.EXHAUSTED_RETRIES)",
        tests=(TIMEOUT,),
    ),
    "DJ-12 deadline stage": Mutant(
        file=DECIDE,
        old="at = stage or stage_in(state)",
        new="at = stage or Stage.EXEC",
        tests=(LATE,),
    ),
    # A timer that ends a job does not say which end it was.
    "DJ-15 timer": Mutant(
        file=DECIDE,
        old="cause, reason = Cause.ATTEMPTS_SPENT, ReasonCode.EXHAUSTED_RETRIES",
        new="cause, reason = Cause.DEADLINE_PASSED, ReasonCode.EXHAUSTED_RETRIES",
        tests=(TIMER,),
    ),
    # A soft cancel that is carried out gives another cause than what ended the wait for the holder.
    "DJ-15 grace": Mutant(
        file=DECIDE,
        old="return _cancel(lifecycle, state, Cause.CANCEL_GRACE_OVER)",
        new="return _cancel(lifecycle, state, Cause.CANCEL_HOLDER_GONE)",
        tests=(CANCELLED,),
    ),
    "DJ-15 let go": Mutant(
        file=DECIDE,
        old="return _cancel(lifecycle, state, Cause.CANCEL_LET_GO)",
        new="return _cancel(lifecycle, state, Cause.CANCEL_HOLDER_GONE)",
        tests=(CANCELLED,),
    ),
    "DJ-15 gone": Mutant(
        file=DECIDE,
        old="_cancel(lifecycle, state, Cause.CANCEL_HOLDER_GONE) if",
        new="_cancel(lifecycle, state, Cause.CANCEL_GRACE_OVER) if",
        tests=(CANCELLED,),
    ),
    "DJ-15 postgres grace": Mutant(
        file=SWEEP_SQL, old="'cancel_grace_over'", new="'cancel_let_go'", tests=(CANCELLED,)
    ),
    # The event of a cancel does not say why somebody asked for it.
    "DJ-15 sqlite asked": Mutant(
        file="ledgers/sqlite/moves.py", old='"reason": request.cause}', new='"reason": None}', tests=(ASKED,)
    ),
    "DJ-15 postgres asked": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="coalesce(to_json(w.cause)::text, 'null')), 'UTF8')",
        new="'null'), 'UTF8')",
        tests=(ASKED,),
    ),
    # A step from a held state to another loses its cause.
    "DJ-15 sqlite held": Mutant(
        file="ledgers/sqlite/turn.py",
        old="act = StepWrite(step, who, place, wait, cause=advance.cause, data=data)",
        new="act = StepWrite(step, who, place, wait, cause=None if step.held else advance.cause, data=data)",
        tests=(STORIES,),
    ),
    "DJ-15 postgres held": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="t.attempt, p_role, o.cause, convert_to(o.data, 'UTF8'));",
        new="t.attempt, p_role, null, convert_to(o.data, 'UTF8'));",
        tests=(STORIES,),
    ),
    # A move loses its cause. On PostgreSQL, one of those that are made together in one statement.
    "DJ-15 sqlite moved": Mutant(
        file="ledgers/sqlite/moves.py",
        old="StepWrite(step, who, place, wait, revokes, cause, event_data, request_id)",
        new="StepWrite(step, who, place, wait, revokes, None, event_data, request_id)",
        tests=(f"{MOVED}[sqlite]",),
    ),
    "DJ-15 postgres moved": Mutant(
        file=f"{SQL}/70_moves.sql",
        old="p.role, p.cause, p.request, p.data from plain p",
        new="p.role, null, p.request, p.data from plain p",
        tests=(f"{MOVED}[postgres]",),
    ),
    # A completion loses its cause. On PostgreSQL, one of those that are made together in one statement.
    "DJ-15 sqlite completed": Mutant(
        file="ledgers/sqlite/turn.py",
        old="act = StepWrite(step, who, place, wait, cause=advance.cause, data=data)",
        new="act = StepWrite(step, who, place, wait, cause=None if step.ended else advance.cause, data=data)",
        tests=(f"{ADVANCED}[sqlite-leased-job]",),
    ),
    "DJ-15 postgres completed": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="by_role, causes[g.i], convert_to(datas[g.i], 'UTF8') from gone g",
        new="by_role, null, convert_to(datas[g.i], 'UTF8') from gone g",
        tests=(f"{TOGETHER}[postgres]",),
    ),
    # A start that is reported with its completion loses its cause.
    "DJ-15 postgres started": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="by_role, start_causes[g.i], convert_to(start_datas[g.i], 'UTF8')",
        new="by_role, null, convert_to(start_datas[g.i], 'UTF8')",
        tests=(f"{TOGETHER}[postgres]",),
    ),
    # A search for a type of which there are few events does not keep to its time.
    "DJ-13 postgres rare": Mutant(
        file="ledgers/postgres/read.sql",
        old="and e.type = $1 and e.at >= coalesce($2::timestamptz, '-infinity')\n order by e.at, e.id, e.version limit $3",
        new="and e.type = $1 and ($2::timestamptz is null or true)\n order by e.at, e.id, e.version limit $3",
        tests=(f"{LEDGER}/test_feed.py::test_events_are_found_by_type_correlation_and_time[postgres]",),
    ),
    # A job that is submitted by the statement for alike jobs loses its correlation.
    "DJ-13 postgres alike": Mutant(
        file=f"{SQL}/40_submit.sql",
        old="prio, job_id, p_correlation, p_trace, p_parent, payload from i",
        new="prio, job_id, null, p_trace, p_parent, payload from i",
        tests=(f"{SUBMITTED}[postgres]",),
    ),
    # A dead letter has another stage or reason than its writer gave.
    "DJ-12 sqlite stage": Mutant(
        file="ledgers/sqlite/steps.py", old='"stage": death.stage.value,', new='"stage": "exec",', tests=(REJECTED,)
    ),
    "DJ-12 postgres stage": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="else p_reason end, p_stage, p_error,",
        new="else p_reason end, 'exec', p_error,",
        tests=(REJECTED,),
    ),
    "DJ-12 sqlite reason": Mutant(
        file="ledgers/sqlite/steps.py",
        old='"reason": death.reason_code.value,',
        new='"reason": "timeout",',
        tests=(REJECTED,),
    ),
    "DJ-12 postgres reason": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="'compensation_failed' else p_reason end,",
        new="'compensation_failed' else 'timeout' end,",
        tests=(REJECTED,),
    ),
    # A compensation that dies is a dead letter like any other.
    "DJ-17 sqlite reason": Mutant(
        file="ledgers/sqlite/queries/steps.sql",
        old="iif(j.compensates IS NULL, :reason, 'compensation_failed')",
        new=":reason",
        tests=(f"{COMPENSATION}::test_a_compensation_that_dies_says_so",),
    ),
    "DJ-17 postgres reason": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="case when t.flags & 1 = 1 then 'compensation_failed' else p_reason end",
        new="p_reason",
        tests=(f"{COMPENSATION}::test_a_compensation_that_dies_says_so",),
    ),
    # A compensated job does not say which job undid it.
    "DJ-17 sqlite cause": Mutant(
        file="ledgers/sqlite/steps.py",
        old="cause = Cause.COMPENSATED % job_id_of(tx, row.id)",
        new='cause = "compensated"',
        tests=(f"{COMPENSATION}::test_a_finished_compensation_is_recorded_on_its_original[sqlite]",),
    ),
    "DJ-17 postgres cause": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="format(_cause('compensated'), by_job)",
        new="'compensated'",
        tests=(f"{COMPENSATION}::test_a_finished_compensation_is_recorded_on_its_original[postgres]",),
    ),
    # A finalized artifact does not say which job finalized it.
    "JQ-5 sqlite cause": Mutant(
        file="ledgers/sqlite/migrations/0026_one_look_per_event.sql",
        old="'finalized by ' || (SELECT job_id FROM trellis_submission WHERE id = new.job)",
        new="'finalized'",
        tests=(f"{LEDGER}/test_artifacts.py::test_a_job_completes_together_with_the_artifact_it_names[sqlite]",),
    ),
    "JQ-5 postgres cause": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="'finalized by ' || by_job",
        new="'finalized'",
        tests=(f"{LEDGER}/test_artifacts.py::test_a_job_completes_together_with_the_artifact_it_names[postgres]",),
    ),
}
