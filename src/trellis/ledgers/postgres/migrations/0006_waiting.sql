-- How many jobs of a concurrency key wait is asked at every submit that bounds them; only resting ones had no index for it.
create index resting_key on resting (ckey) where ckey is not null;

-- These take two more arguments now: whether the id is its caller's choice, and how many may wait.
drop function if exists submit_keyed(int, smallint[], text[], int[], smallint[], bytea[], smallint[], smallint[], float8[], timestamptz[],
  float8[], text[], text[], text[], text[], text[], int[], text[], text[], bytea[], boolean);
drop function if exists _submit_one(int, smallint, timestamptz, bigint, smallint, text, int, smallint, bytea, smallint, smallint, float8,
  timestamptz, float8, text, text, text, text, text, int, text, text, bytea, boolean);
