-- A job may be of several batches, and the child of a job besides: `spawned` has a row for each job that waits for it.
alter table spawned drop constraint spawned_pkey, add primary key (id, parent);
drop index spawned_parent;
create index spawned_parent on spawned (parent, awaited, id);
comment on column spawned.id is 'the child, or the job of a batch';
comment on column spawned.parent is 'the job that spawned it, or the completion job of the batch';
