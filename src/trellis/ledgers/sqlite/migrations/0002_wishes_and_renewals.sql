-- Who asked for a soft cancel and why, one renewal for each job, and the way from a concurrency key to its jobs.

-- It counts for its epoch only: the next holder of the job was asked for nothing.
CREATE TABLE trellis_wish (
  job INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, role INTEGER NOT NULL, actor INTEGER NOT NULL, cause TEXT
) STRICT;
CREATE TRIGGER trellis_purge_removes_the_wish AFTER INSERT ON trellis_purge BEGIN
  DELETE FROM trellis_wish WHERE job = new.job;
END;

DELETE FROM trellis_signal WHERE type = 'job_lease_renewed';
CREATE UNIQUE INDEX trellis_signal_renewal ON trellis_signal (job) WHERE type = 'job_lease_renewed';

CREATE INDEX trellis_job_of_key ON trellis_job (ckey) WHERE ckey IS NOT NULL;

-- How many of a type may be held at once; NULL for any number.
ALTER TABLE trellis_type_control ADD COLUMN held_max INTEGER;

-- Who follows the feed under a name, how far, and until when nobody else may.
CREATE TABLE trellis_follower (
  name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, actor INTEGER NOT NULL, until INTEGER NOT NULL, place TEXT
) STRICT, WITHOUT ROWID;
