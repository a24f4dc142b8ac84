-- The floor on SQLite. States: 1 waiting, 2 assigned, 3 running, 4 succeeded. An event IS the transition: its trigger
-- checks it and moves the job.
create table job (
  id integer primary key, state integer not null default 0, version integer not null default 0,
  epoch integer not null default 0, attempt integer not null default 0, owner integer, until real, payload blob not null
) strict;
create index job_waiting on job (id) where state = 1;
create index job_held on job (until) where state in (2, 3);
create table event (
  seq integer primary key, job integer not null, version integer not null, at real not null, epoch integer not null,
  owner integer not null, attempt integer not null, source integer not null, target integer not null, role integer not null
) strict;
create unique index event_job on event (job, version);

create trigger event_moves_job after insert on event begin
  select case
    when j.id is null or new.version <> j.version + 1 or new.source <> j.state then raise(abort, 'event refused: not next')
    when new.target <> new.source + 1 or new.role <> iif(new.source = 0, 1, 2) then raise(abort, 'event refused: undeclared')
    when new.attempt <> j.attempt or new.epoch < j.epoch + (new.target = 2) then raise(abort, 'event refused: progress')
  end from (select 1) left join job j on j.id = new.job;
  update job set state = new.target, version = new.version, epoch = new.epoch, owner = new.owner,
                 until = iif(new.target in (2, 3), new.at + 30, null) where id = new.job;
end;
create trigger job_moves_by_event before update of state, version on job
when not exists (select 1 from event e where e.job = old.id and e.version = new.version and e.target = new.state)
begin
  select raise(abort, 'a job moves only by its event');
end;
create trigger event_never_changes before update on event begin
  select raise(abort, 'an event never changes');
end;
