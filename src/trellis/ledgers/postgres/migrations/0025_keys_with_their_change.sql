-- The verbs store the key of a request themselves, in the transaction of their change. Their new argument may be left out.
drop function if exists moves(int[], text[], text[], text[], int[], float8[], int[], int[], text[], bytea[], text[], text[], text[]);
drop function if exists cancel(int, text, boolean, text, float8, text);
drop function if exists requeue(int, text[], text, text);
drop function if exists submit_keyed(int, smallint[], text[], int[], smallint[], bytea[], smallint[], smallint[], float8[], timestamptz[],
  float8[], text[], text[], text[], text[], text[], int[], text[], text[], bytea[], boolean, boolean[], int[], smallint[]);
