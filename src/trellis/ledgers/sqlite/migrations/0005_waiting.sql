-- How many jobs of a concurrency key wait is asked at every submit that bounds them; what has ended must not be read for it.
CREATE INDEX trellis_job_waiting ON trellis_job (ckey) WHERE ckey IS NOT NULL AND place < 4;

-- Jobs that retention passed by because a key of theirs must still answer, and when it looks at them again.
CREATE TABLE trellis_kept (job INTEGER PRIMARY KEY, until INTEGER NOT NULL) STRICT;
CREATE INDEX trellis_kept_until ON trellis_kept (until);
CREATE TRIGGER trellis_purge_forgets_the_kept AFTER INSERT ON trellis_purge BEGIN
  DELETE FROM trellis_kept WHERE job = new.job;
END;

-- What rests for good is more than all that waits: a look at one state must not read the others.
CREATE INDEX trellis_job_standing ON trellis_job (lifecycle, state) WHERE place = 2;
