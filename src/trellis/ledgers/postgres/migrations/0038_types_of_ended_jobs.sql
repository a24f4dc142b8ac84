-- Ended jobs of a type, and dead letters of a reason, are listed without reading others. The type of a job that ended before is filled in
-- by the sweep, a part at a time (`_fill_types`): `ended_untyped` says below which number it is still 0. So no row is written again under
-- the lock of this migration.
alter table ended add column type int not null default 0;
insert into meta (name, value) select 'ended_untyped', (max(n.id) + 1)::text from ended n having count(*) > 0;
drop index if exists ended_state;
create index ended_type on ended (lifecycle, state, type, id);
create index dead_letter_reason on dead_letter (reason_code, id) where requeued_at is null;
-- Newest first of a key: with its number in the index, a key of a million jobs is not sorted for a page.
drop index if exists job_ckey;
create index job_ckey on job (ckey, id) where ckey is not null;
