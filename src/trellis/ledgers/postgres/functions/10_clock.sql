-- The ledger's clock. A database made for tests replaces this one function.
create or replace function trellis.now() returns timestamptz language sql volatile as $$ select clock_timestamp() $$;
