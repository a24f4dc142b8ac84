-- The declared transitions as one bit each, and the rank of each state as one byte, so that the event guard reads constants.
create or replace function trellis._declared(p_lifecycle smallint, p_role smallint, p_source smallint, p_target smallint)
returns boolean language sql immutable as $f$
  select get_bit('\x{bits}'::bytea, ((p_lifecycle::bigint * 16 + p_role) * 16 + p_source) * 16 + p_target) = 1
$f$;
create or replace function trellis._rank(p_lifecycle smallint, p_state smallint) returns int language sql immutable as $f$
  select get_byte('\x{ranks}'::bytea, p_lifecycle::int * 16 + p_state)
$f$;
-- The texts that the engine records as causes; `lifecycles/causes.py` holds them for both ledgers.
create or replace function trellis._cause(p_name text) returns text language sql immutable as $f$
  select case p_name {causes} end
$f$;
-- Whether a new job may not have this id: it ends as only derived ids do, and this is not the role that derives them.
create or replace function trellis._id_is_reserved(p_job_id text, p_lifecycle smallint, p_role smallint) returns boolean
language sql immutable as $f$
  select p_job_id ~ '{reserved}' and (p_lifecycle::int, p_role::int) not in ({deriving})
$f$;
