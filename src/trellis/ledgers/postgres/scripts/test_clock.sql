-- A clock that tests set. Only a database migrated for tests has it.
create table if not exists trellis.test_clock (at timestamptz not null);
insert into trellis.test_clock select clock_timestamp() where not exists (select from trellis.test_clock);
create or replace function trellis.now() returns timestamptz language sql volatile as $f$ select at from trellis.test_clock $f$;
