-- What applications declare about their job types: it holds for every submit that does not choose an option by name.
create table type_options (
  lifecycle smallint, type int,
  prio smallint not null, max_attempts int not null check (max_attempts between 1 and 1000),
  max_deaths smallint not null check (max_deaths between 0 and 1000),
  deadline_s float8 check (deadline_s > 0), concurrency_limit int not null check (concurrency_limit >= 1),
  keyed boolean not null,  -- a function of the application computes each job's concurrency key
  compensation text check (length(compensation) <= 200), changed_by int not null, changed_at timestamptz not null,
  primary key (lifecycle, type)
);

-- A submit says which options it chose.
drop function if exists submit_plain(int, smallint, boolean, text[], int[], smallint[], bytea[], smallint[], smallint[], float8[], timestamptz[],
                                     float8[], text[], text[], text[]);
drop function if exists submit_keyed(int, smallint[], text[], int[], smallint[], bytea[], smallint[], smallint[], float8[], timestamptz[],
                                     float8[], text[], text[], text[], text[], text[], int[], text[], text[], bytea[], boolean, boolean[],
                                     int[]);
drop function if exists _submit_one(int, smallint, timestamptz, bigint, smallint, text, int, smallint, bytea, smallint, smallint, float8,
                                    timestamptz, float8, text, text, text, text, text, int, text, text, bytea, boolean, boolean, int);
