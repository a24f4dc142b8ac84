-- Unique jobs (engine/uniqueness.py): the unique key of each job that has one. One job of a key holds it. The others had it before.
CREATE TABLE trellis_unique_job (
  job INTEGER PRIMARY KEY, type TEXT NOT NULL, scope TEXT NOT NULL, key TEXT NOT NULL, holds INTEGER NOT NULL CHECK (holds IN (0, 1)),
  unfinished INTEGER NOT NULL CHECK (unfinished IN (0, 1)),  -- it holds the key until it has ended, not only while it waits
  until INTEGER,             -- and until then, whatever its state
  first_at INTEGER NOT NULL, -- when the first of the jobs was submitted that were replaced one after the other
  replaced TEXT              -- the job that it replaced
) STRICT;
CREATE UNIQUE INDEX trellis_unique_job_holder ON trellis_unique_job (type, scope, key) WHERE holds = 1;
CREATE TRIGGER trellis_purge_removes_unique_key AFTER INSERT ON trellis_purge BEGIN
  DELETE FROM trellis_unique_job WHERE job = new.job;
END;

-- What a type declares about uniqueness, as JSON.
ALTER TABLE trellis_type_options ADD COLUMN unique_rule TEXT;
