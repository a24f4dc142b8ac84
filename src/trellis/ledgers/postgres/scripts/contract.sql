-- The declared transitions as one bit each, and the rank of each state as one byte, so that the event guard reads constants.
create or replace function trellis._declared(p_lifecycle smallint, p_role smallint, p_source smallint, p_target smallint)
returns boolean language sql immutable as $f$
  select get_bit('\x{bits}'::bytea, ((p_lifecycle::bigint * 16 + p_role) * 16 + p_source) * 16 + p_target) = 1
$f$;
create or replace function trellis._rank(p_lifecycle smallint, p_state smallint) returns int language sql immutable as $f$
  select get_byte('\x{ranks}'::bytea, p_lifecycle::int * 16 + p_state)
$f$;
-- The texts that the engine records as causes of what is no decision of engine/decide.py; `lifecycles/events.py` holds them all.
create or replace function trellis._cause(p_name text) returns text language sql immutable as $f$
  select case p_name {causes} end
$f$;
-- Whether a new job may not have this id: it ends as only derived ids do, and this is not the role that derives them; or it is that of a
-- report of an alert.
create or replace function trellis._id_is_reserved(p_job_id text, p_lifecycle smallint, p_role smallint) returns boolean
language sql immutable as $f$
  select (p_job_id ~ '{reserved}' and (p_lifecycle::int, p_role::int) not in ({deriving}))
    or (p_job_id ~ '{reports}' and p_role <> {reporting})
$f$;
-- Whether one of these ids, which are joined to one text, contains what every reserved id does. Only then is each looked at. A search
-- for each text takes a third of the time of one pattern.
create or replace function trellis._may_be_reserved(p_job_ids text) returns boolean language sql immutable as $f$
  select {reserved_marks}
$f$;
-- A further fact is a further argument: without this, the function of an earlier version would stay beside the new one.
do $f$
declare earlier regprocedure;
begin
  for earlier in select p.oid::regprocedure from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                  where n.nspname = 'trellis' and p.proname = '_facts' loop
    execute format('drop function %s', earlier);
  end loop;
end $f$;
-- The facts that a decision depends on, as engine/decide.py numbers them. Call it with named arguments.
create or replace function trellis._facts({fact_names}) returns int language sql immutable as $f$
  select {fact_bits}
$f$;
-- Whether so few attempts were lost that one more which never began costs none (engine/retry_policy.py).
create or replace function trellis._sparable(p_attempt int) returns boolean language sql immutable as $f$
  select p_attempt < {unbegun_losses_max}
$f$;
-- Whether a job must have its worker to itself; why, and the same for SQLite: engine/retry_policy.py.
create or replace function trellis._runs_alone(p_deaths smallint, p_max_deaths smallint, p_attempt int, p_max_attempts int) returns boolean
language sql immutable as $f$
  select p_deaths > 0 and (p_deaths >= {company_deaths_max} or p_max_deaths between 1 and p_deaths + 1 or p_attempt + 1 >= p_max_attempts)
$f$;
-- What a verb of the ledger does, in the words of a refusal.
create or replace function trellis._action(p_verb text) returns text language sql immutable as $f$
  select case p_verb {actions} end
$f$;
-- The most signals that one job keeps (engine/jobs.py).
create or replace function trellis._job_signals_max() returns int language sql immutable as $f$ select {job_signals_max} $f$;
-- The most jobs of one batch (engine/job_batches.py).
create or replace function trellis._batch_max() returns int language sql immutable as $f$ select {batch_max} $f$;
-- The most jobs that one call changes (engine/job_changes.py), and the names of priorities, from 0.
create or replace function trellis._changed_max() returns int language sql immutable as $f$ select {changed_max} $f$;
create or replace function trellis._priority_name(p_prio smallint) returns text language sql immutable as $f$
  select ('{{priorities}}'::text[])[p_prio + 1]
$f$;
-- How long the child of a cancelled job may take to stop (engine/jobs.py).
create or replace function trellis._orphan_grace() returns interval language sql immutable as $f$
  select interval '{orphan_grace_s} s'
$f$;
-- When a sweep comes back for the next token of a key, at the earliest, and for tokens that are set aside (engine/key_rates.py).
create or replace function trellis._token_wait() returns interval language sql immutable as $f$
  select interval '{token_wait_s} s'
$f$;
create or replace function trellis._unclaimed_wait() returns interval language sql immutable as $f$
  select interval '{unclaimed_wait_s} s'
$f$;
-- How long an idempotency key is kept at least (engine/request_keys.py).
create or replace function trellis._key_age() returns interval language sql immutable as $f$
  select interval '{key_s} s'
$f$;
