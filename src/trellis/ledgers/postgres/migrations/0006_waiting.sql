-- How many jobs of a concurrency key wait is asked at every submit that bounds them; only resting ones had no index for it.
create index resting_key on resting (ckey) where ckey is not null;

-- These take two more arguments now: whether the id is its caller's choice, and how many may wait.
drop function if exists submit_keyed(int, smallint[], text[], int[], smallint[], bytea[], smallint[], smallint[], float8[], timestamptz[],
  float8[], text[], text[], text[], text[], text[], int[], text[], text[], bytea[], boolean);
drop function if exists _submit_one(int, smallint, timestamptz, bigint, smallint, text, int, smallint, bytea, smallint, smallint, float8,
  timestamptz, float8, text, text, text, text, text, int, text, text, bytea, boolean);

-- What rests for good is more than all that waits: a look at one state must not read the others. Newest first, by a number that is not the
-- primary key's: where most jobs rest in one state, the planner would look for the few of another by walking that one.
create index resting_state on resting (lifecycle, state, (-id));
