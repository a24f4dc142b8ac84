-- A claim may name the only job that it takes.
drop function if exists turn(int, smallint, bigint[], int[], smallint, bytea[], float8[], bigint[], int[], jsonb, text, int[], int[], int[],
                             smallint[], bigint[], int, int, boolean);
drop function if exists _claim(int, smallint, timestamptz, bigint, lifecycle, text, int[], int[], int[], smallint[], bigint[], int, int, boolean);
drop function if exists _pick(smallint, int[], smallint[], bigint[], int, timestamptz, boolean);
