-- Events by type and time, without those that nearly every leased-job and bus-job has: queued, claimed, started, succeeded, accepted,
-- scheduled, dispatched. A job that runs without trouble costs nothing here.
create index if not exists event_rare_type on event (type, at) where type not in (1, 2, 3, 4, 14, 31, 32);
