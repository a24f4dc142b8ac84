"""Mutants of what each ledger records on its own account: causes of events, stages and reasons of dead letters.

And of rules that SQLite's ledger decides beside those of the families' own tables.
"""

from tests.mutants.mutant import Mutant

LEDGER = "tests/ledgers/conformance"
SQL = "ledgers/postgres/functions"
SWEEP = "ledgers/sqlite/sweep.py"
SWEEP_SQL = f"{SQL}/80_sweep.sql"

LOST = f"{LEDGER}/test_sweep.py::test_a_lost_lease_opens_the_next_attempt"
SPENT = f"{LEDGER}/test_sweep.py::test_a_lost_lease_without_attempts_left_is_dead_lettered"
DIED = f"{LEDGER}/test_sweep.py::test_a_payload_that_kills_its_worker_twice_is_dead_lettered"
LATE = f"{LEDGER}/test_parity.py::test_a_deadline_names_the_stage_it_found"
TIMEOUT = f"{LEDGER}/test_sweep.py::test_a_passed_deadline_dead_letters_with_timeout"
TIMER = f"{LEDGER}/test_parity.py::test_a_timer_that_ends_a_job_says_why_and_counts_as_exhausted"
CANCELLED = f"{LEDGER}/test_parity.py::test_a_soft_cancel_that_is_carried_out_says_why_and_raises_the_epoch"
ASKED = f"{LEDGER}/test_cancel.py::test_the_event_of_a_cancel_says_who_asked_the_holder_to_stop"
REJECTED = f"{LEDGER}/test_advance.py::test_a_rejected_job_leaves_a_complete_dead_letter"
COMPENSATION = f"{LEDGER}/test_compensation.py"
STORIES = f"{LEDGER}/test_differential.py::test_both_ledgers_tell_the_same_story"

RULES: dict[str, Mutant] = {
    # A key lets one job more be held than its limit says.
    "JQ-7 sqlite": Mutant(
        file="ledgers/sqlite/queries/names.sql",
        old="INSERT INTO trellis_concurrency_key (name, slots) VALUES (?, ?) RETURNING id;",
        new="INSERT INTO trellis_concurrency_key (name, slots) VALUES (?, ? + 1) RETURNING id;",
        tests=(f"{LEDGER}/test_keys.py::test_one_job_of_a_key_is_handed_out_at_a_time[sqlite]",),
    ),
    # A role makes the steps of another.
    "DJ-1 sqlite": Mutant(
        file="ledgers/sqlite/migrations/0001_ledger.sql",
        old="WHEN a.roles >> new.role & 1 = 0 THEN",
        new="WHEN a.roles = 0 THEN",
        tests=("tests/ledgers/sqlite/test_transitions_by_hand.py::test_exactly_the_declared_steps_pass[leased-job]",),
    ),
    # The database takes an event of an earlier attempt.
    "DJ-3 sqlite": Mutant(
        file="ledgers/sqlite/migrations/0001_ledger.sql",
        old="OR new.attempt <> CASE a.opens WHEN 0 THEN j.attempt WHEN 1 THEN j.attempt + 1 ELSE 0 END\n",
        new="",
        tests=("tests/ledgers/sqlite/test_guards.py::test_the_file_refuses",),
    ),
    # A payload kills as many workers as there are.
    "DJ-18 sqlite": Mutant(
        file=SWEEP,
        old="if exhaust is not None and 0 < max_deaths <= deaths:",
        new="if exhaust is not None and 0 < max_deaths <= deaths - 9:",
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
    # A lost lease that opens the next attempt has no cause, or another.
    "DJ-15 sqlite expired": Mutant(
        file=SWEEP,
        old="return _Verdict(expire, cause=Cause.LEASE_EXPIRED, died=state.runs_code)",
        new="return _Verdict(expire, died=state.runs_code)",
        tests=(LOST,),
    ),
    "DJ-15 sqlite spared": Mutant(
        file=SWEEP,
        old='return _Verdict(expire, cause="lease expired", spared=True)',
        new="return _Verdict(expire, spared=True)",
        tests=(LOST,),
    ),
    "DJ-15 postgres expired": Mutant(
        file=SWEEP_SQL, old="spared, _cause('lease_expired'));", new="spared, null);", tests=(LOST,)
    ),
    "DJ-15 postgres spared": Mutant(
        file=SWEEP_SQL,
        old="spared, _cause('lease_expired'));",
        new="spared, case when not spared then _cause('lease_expired') end);",
        tests=(LOST,),
    ),
    # The text of a cause changes for both ledgers at once.
    "DJ-15 text": Mutant(
        file="lifecycles/causes.py",
        old='LEASE_EXPIRED = "lease expired"',
        new='LEASE_EXPIRED = "lease over"',
        tests=(LOST,),
    ),
    # What spent the attempts is not in the letter, or not in the event.
    "DJ-12 sqlite spent": Mutant(
        file=SWEEP,
        old="        error = Cause.LEASE_EXPIRED\n",
        new="        error = Cause.ATTEMPTS_SPENT\n",
        tests=(SPENT,),
    ),
    "DJ-12 postgres spent": Mutant(
        file=SWEEP_SQL,
        old="else _cause('lease_expired') end;",
        new="else _cause('attempts_spent') end;",
        tests=(SPENT,),
    ),
    "DJ-12 sqlite spent reason": Mutant(
        file=SWEEP,
        old="reason_code=ReasonCode.EXHAUSTED_RETRIES, stage=stage_in(state)",
        new="reason_code=ReasonCode.TIMEOUT, stage=stage_in(state)",
        tests=(SPENT,),
    ),
    "DJ-12 postgres spent reason": Mutant(
        file=SWEEP_SQL,
        old="else 'exhausted_retries' end), _stage_of(x), died);",
        new="else 'timeout' end), _stage_of(x), died);",
        tests=(SPENT,),
    ),
    "DJ-12 sqlite spent stage": Mutant(
        file=SWEEP,
        old="reason_code=ReasonCode.EXHAUSTED_RETRIES, stage=stage_in(state)",
        new="reason_code=ReasonCode.EXHAUSTED_RETRIES, stage=Stage.FETCH",
        tests=(SPENT,),
    ),
    "DJ-12 postgres spent stage": Mutant(
        file=SWEEP_SQL, old="end), _stage_of(x), died);", new="end), 'fetch', died);", tests=(SPENT,)
    ),
    # How often workers died is counted wrong, or what they died of is called something else.
    "DJ-12 sqlite died": Mutant(
        file=SWEEP,
        old="error = Cause.WORKER_DIED % died_often(deaths)",
        new="error = Cause.WORKER_DIED % died_often(1)",
        tests=(DIED,),
    ),
    "DJ-12 postgres died": Mutant(
        file=SWEEP_SQL, old="format('%s times', t.deaths) end;", new="format('%s times', l.deaths) end;", tests=(DIED,)
    ),
    "DJ-12 sqlite died reason": Mutant(
        file=SWEEP,
        old="reason_code=ReasonCode.INFRASTRUCTURE_FAILURE,",
        new="reason_code=ReasonCode.EXHAUSTED_RETRIES,",
        tests=(DIED,),
    ),
    "DJ-12 postgres died reason": Mutant(
        file=SWEEP_SQL,
        old="case when poison then 'infrastructure_failure'",
        new="case when poison then 'exhausted_retries'",
        tests=(DIED,),
    ),
    "DJ-12 sqlite died stage": Mutant(
        file=SWEEP,
        old="reason_code=ReasonCode.INFRASTRUCTURE_FAILURE, stage=stage_in(state)",
        new="reason_code=ReasonCode.INFRASTRUCTURE_FAILURE, stage=Stage.INPUT",
        tests=(DIED,),
    ),
    "DJ-12 postgres died stage": Mutant(
        file=SWEEP_SQL,
        old="end), _stage_of(x), died);",
        new="end), case when poison then 'input' else _stage_of(x) end, died);",
        tests=(DIED,),
    ),
    # A passed deadline is told otherwise.
    "DJ-15 sqlite deadline": Mutant(
        file=SWEEP,
        old="death, cause=Cause.DEADLINE_PASSED)",
        new="death, cause=Cause.ATTEMPTS_SPENT)",
        tests=(LATE,),
    ),
    "DJ-15 postgres deadline": Mutant(
        file=SWEEP_SQL,
        old="p_now, false, _cause('deadline_passed'), null, null,",
        new="p_now, false, _cause('attempts_spent'), null, null,",
        tests=(LATE,),
    ),
    "DJ-12 sqlite deadline reason": Mutant(
        file=SWEEP,
        old="reason_code=ReasonCode.TIMEOUT, stage=stage,",
        new="reason_code=ReasonCode.EXHAUSTED_RETRIES, stage=stage,",
        tests=(TIMEOUT,),
    ),
    "DJ-12 postgres deadline reason": Mutant(
        file=SWEEP_SQL, old="_if_buried(x, 'timeout')", new="_if_buried(x, 'exhausted_retries')", tests=(TIMEOUT,)
    ),
    "DJ-12 sqlite deadline stage": Mutant(
        file=SWEEP,
        old="stage = stage_in(state_of(row.lifecycle, row.state))",
        new="stage = Stage.EXEC",
        tests=(LATE,),
    ),
    "DJ-12 postgres deadline stage": Mutant(
        file=SWEEP_SQL,
        old="_if_buried(x, 'timeout'), _stage_of(x),",
        new="_if_buried(x, 'timeout'), 'exec',",
        tests=(LATE,),
    ),
    "DJ-12 sqlite deadline error": Mutant(
        file=SWEEP,
        old="stage=stage, last_error=Cause.DEADLINE_PASSED)",
        new="stage=stage, last_error=Cause.LEASE_EXPIRED)",
        tests=(LATE,),
    ),
    "DJ-12 postgres deadline error": Mutant(
        file=SWEEP_SQL,
        old="_stage_of(x), _cause('deadline_passed'));",
        new="_stage_of(x), _cause('lease_expired'));",
        tests=(LATE,),
    ),
    # A timer that ends a job does not say which end it was.
    "DJ-15 sqlite timer": Mutant(
        file=SWEEP,
        old="error = Cause.DEADLINE_PASSED if late else Cause.ATTEMPTS_SPENT",
        new="error = Cause.DEADLINE_PASSED",
        tests=(TIMER,),
    ),
    "DJ-15 postgres timer": Mutant(
        file=SWEEP_SQL,
        old="why := _cause(case when late then 'deadline_passed' else 'attempts_spent' end);",
        new="why := _cause('deadline_passed');",
        tests=(TIMER,),
    ),
    # A soft cancel that is carried out gives another cause than what ended the wait for the holder.
    "DJ-15 sqlite grace": Mutant(
        file=SWEEP, old="cause=Cause.CANCEL_GRACE_OVER", new="cause=Cause.CANCEL_HOLDER_GONE", tests=(CANCELLED,)
    ),
    "DJ-15 postgres grace": Mutant(
        file=SWEEP_SQL, old="'cancel_grace_over'", new="'cancel_holder_gone'", tests=(CANCELLED,)
    ),
    "DJ-15 sqlite gone": Mutant(
        file=SWEEP, old="cause=Cause.CANCEL_HOLDER_GONE", new="cause=Cause.CANCEL_GRACE_OVER", tests=(CANCELLED,)
    ),
    "DJ-15 postgres gone": Mutant(
        file=SWEEP_SQL, old="'cancel_holder_gone'", new="'cancel_grace_over'", tests=(CANCELLED,)
    ),
    "DJ-15 sqlite let go": Mutant(
        file="ledgers/sqlite/turn.py",
        old="cause=Cause.CANCEL_LET_GO",
        new="cause=Cause.CANCEL_HOLDER_GONE",
        tests=(CANCELLED,),
    ),
    "DJ-15 postgres let go": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="cancelled := _cancel_now(o.id, p_actor, p_now, p_batch, 'cancel_let_go');",
        new="cancelled := _cancel_now(o.id, p_actor, p_now, p_batch, 'cancel_holder_gone');",
        tests=(CANCELLED,),
    ),
    "DJ-15 postgres start": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="_cancel_now(told.id, p_actor, now_at, batch_no, 'cancel_let_go')",
        new="_cancel_now(told.id, p_actor, now_at, batch_no, 'cancel_holder_gone')",
        tests=(CANCELLED,),
    ),
    # The event of a cancel does not say why somebody asked for it.
    "DJ-15 sqlite asked": Mutant(
        file="ledgers/sqlite/moves.py", old='"reason": cause}', new='"reason": None}', tests=(ASKED,)
    ),
    "DJ-15 postgres asked": Mutant(
        file=f"{SQL}/30_steps.sql", old="coalesce(to_json(w.cause)::text, 'null')", new="'null'", tests=(ASKED,)
    ),
    # A step from a held state to another loses its cause.
    "DJ-15 sqlite held": Mutant(
        file="ledgers/sqlite/turn.py",
        old="act = Act(step, who, place, wait, cause=advance.cause, data=data)",
        new="act = Act(step, who, place, wait, cause=None if step.held else advance.cause, data=data)",
        tests=(STORIES,),
    ),
    "DJ-15 postgres held": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="t.attempt, p_role, o.cause, convert_to(o.data, 'UTF8'));",
        new="t.attempt, p_role, null, convert_to(o.data, 'UTF8'));",
        tests=(STORIES,),
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
        old='cause = f"compensated by {job_id_of(tx, row.id)}"',
        new='cause = "compensated"',
        tests=(f"{COMPENSATION}::test_a_finished_compensation_is_recorded_on_its_original[sqlite]",),
    ),
    "DJ-17 postgres cause": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="'compensated by ' || by_job",
        new="'compensated'",
        tests=(f"{COMPENSATION}::test_a_finished_compensation_is_recorded_on_its_original[postgres]",),
    ),
    # A finalized artifact does not say which job finalized it.
    "JQ-5 sqlite cause": Mutant(
        file="ledgers/sqlite/migrations/0004_artifacts.sql",
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
