-- Every claim looks for jobs whose workers died: those that must run alone are handed out one at a time.
create index ready_died on ready (prio, pos) where deaths > 0;
create index lease_died on lease (id) where deaths > 0;

-- A claim says whether its claimer can run a job alone.
drop function if exists turn(int, smallint, bigint[], int[], smallint, bytea[], float8[], bigint[], int[], jsonb, text, int[], int[], int[],
                             smallint[], bigint[], int, int);
drop function if exists _claim(int, smallint, timestamptz, bigint, lifecycle, text, int[], int[], int[], smallint[], bigint[], int, int);
drop function if exists _pick(smallint, int[], smallint[], bigint[], int, timestamptz);
