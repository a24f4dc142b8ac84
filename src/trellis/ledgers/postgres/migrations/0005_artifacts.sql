-- The lifecycle artifact: which completions finalize one, and the way from a job to what was made for it.

-- The job's holder names a staged artifact of the job, which makes its own step `finalize` in the same transaction.
alter table transition add column finalizes boolean not null default false;
create index job_parent on job (parent_id) where parent_id is not null;

-- These take one more argument now: how long a job rests where a sweep puts it.
drop function if exists sweep(int, boolean, float8, int);
drop function if exists _sweep_due(int, timestamptz, bigint, int);
drop function if exists _ring(bigint, int, timestamptz, bigint);
drop function if exists _own_timer(smallint, smallint, timestamptz);
drop function if exists _was_applied(bigint, int, smallint, smallint, int);
