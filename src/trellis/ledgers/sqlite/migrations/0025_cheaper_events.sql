-- What each event costs besides its own row. The guards refuse what they refused before.

-- An event whose number SQLite chooses replaces none: only a number that was given is looked up. Those are above 0, because a job begins
-- with 0 and the number of its events rises.
DROP TRIGGER trellis_event_is_new;
CREATE TRIGGER trellis_event_is_new BEFORE INSERT ON trellis_event
WHEN new.seq > 0 AND EXISTS (SELECT 1 FROM trellis_event WHERE seq = new.seq) BEGIN
  SELECT raise(ABORT, 'trellis: an event is never replaced');
END;
DROP TRIGGER trellis_job_begins_unsubmitted;
CREATE TRIGGER trellis_job_begins_unsubmitted BEFORE INSERT ON trellis_job
WHEN new.state <> 0 OR new.place <> 0 OR new.version <> 0 OR new.epoch <> 0 OR new.generation <> 0 OR new.attempt <> 0
  OR new.seq <> 0 OR new.slot IS NOT NULL OR EXISTS (SELECT 1 FROM trellis_job WHERE id = new.id)
BEGIN
  SELECT raise(ABORT, 'trellis: a job begins without a state; its first event submits it');
END;

-- The index of listed jobs has these jobs too.
DROP INDEX trellis_job_unlucky;
