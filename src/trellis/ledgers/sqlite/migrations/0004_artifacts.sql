-- A job that ends in an artifact: its completion and the artifact's finalization are one statement, so that no transaction can hold one
-- without the other. And the way from a job to what was made for it.

-- The two steps, from the lifecycles: `completes` is the job's, the other one the artifact's. step = (source * 16 + target) * 256 + event
-- type: found without looking at the job, because every event asks.
CREATE TABLE trellis_finalizer (
  step INTEGER PRIMARY KEY, lifecycle INTEGER NOT NULL, source INTEGER NOT NULL, target INTEGER NOT NULL, type INTEGER NOT NULL,
  completes INTEGER NOT NULL
) STRICT;
CREATE TRIGGER trellis_finalizer_is_contract_i BEFORE INSERT ON trellis_finalizer
WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_finalizer_is_contract_u BEFORE UPDATE ON trellis_finalizer
WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_finalizer_is_contract_d BEFORE DELETE ON trellis_finalizer
WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;

-- The artifact that a job is about to be completed with. The completion takes the row away.
CREATE TABLE trellis_finalizing (job INTEGER PRIMARY KEY, artifact INTEGER NOT NULL) STRICT;

-- A job whose lost history is being written down again: its two halves come back in any order. Only a job without any event can be, and
-- only while the program that puts jobs back says so (meta.restoring).
CREATE TABLE trellis_restoring (job INTEGER PRIMARY KEY) STRICT;
CREATE TRIGGER trellis_restoring_is_of_new_jobs BEFORE INSERT ON trellis_restoring
WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'restoring') OR (SELECT version FROM trellis_job WHERE id = new.job) IS NOT 0 BEGIN
  SELECT raise(ABORT, 'trellis: only a job without events can be restored, by a restore');
END;
CREATE TRIGGER trellis_restoring_stays_with_its_job BEFORE UPDATE ON trellis_restoring BEGIN
  SELECT raise(ABORT, 'trellis: only a job without events can be restored, by a restore');
END;

-- The completion itself makes the artifact's step, just before its own. A trigger does not fire for what it does itself, so the
-- artifact's event passes here and nowhere else; where a connection lets triggers recur, both are refused. A restored artifact makes its
-- step itself. A job has one final artifact whichever way it came, and none while it is here and has not completed.
CREATE TRIGGER trellis_event_finalizes BEFORE INSERT ON trellis_event
WHEN EXISTS (SELECT 1 FROM trellis_finalizer f WHERE f.step = (new.source * 16 + new.target) * 256 + new.type
    AND f.lifecycle = (SELECT lifecycle FROM trellis_job WHERE id = new.job))
BEGIN
  SELECT CASE
    WHEN r.job IS NULL AND NOT f.completes THEN raise(ABORT, 'trellis: an artifact is finalized only by the completion of its job')
    WHEN r.job IS NULL AND NOT EXISTS (
      SELECT 1 FROM trellis_finalizing n JOIN trellis_job a ON a.id = n.artifact
      JOIN trellis_finalizer d ON NOT d.completes AND d.lifecycle = a.lifecycle AND d.source = a.state
      JOIN trellis_submission c ON c.id = a.id AND c.parent = s.job_id
      WHERE n.job = new.job) THEN raise(ABORT, 'trellis: a job completes only with a staged artifact of its own')
    WHEN NOT f.completes AND s.parent IS NULL THEN raise(ABORT, 'trellis: an artifact belongs to a job')
    WHEN (r.job IS NULL OR NOT f.completes) AND EXISTS (
      SELECT 1 FROM trellis_submission c JOIN trellis_job a ON a.id = c.id
      JOIN trellis_finalizer d ON NOT d.completes AND d.lifecycle = a.lifecycle
      JOIN trellis_event e ON e.job = a.id AND e.source = d.source AND e.target = d.target AND e.type = d.type
      WHERE c.parent = iif(f.completes, s.job_id, s.parent) AND c.id <> new.job)
      THEN raise(ABORT, 'trellis: another artifact of the job is final')
    WHEN NOT f.completes AND EXISTS (
      SELECT 1 FROM trellis_submission o JOIN trellis_job j ON j.id = o.id WHERE o.job_id = s.parent AND NOT EXISTS (
        SELECT 1 FROM trellis_finalizer d WHERE d.completes AND d.lifecycle = j.lifecycle AND d.target = j.state))
      THEN raise(ABORT, 'trellis: the job of this artifact has not completed')
  END
  FROM trellis_finalizer f LEFT JOIN trellis_submission s ON s.id = new.job LEFT JOIN trellis_restoring r ON r.job = new.job
  WHERE f.step = (new.source * 16 + new.target) * 256 + new.type;
  INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, cause)
  SELECT a.id, a.version + 1, f.type, f.source, f.target, new.role, new.actor, a.epoch, a.generation, a.attempt, new.at, 2,
    'finalized by ' || (SELECT job_id FROM trellis_submission WHERE id = new.job)
  FROM trellis_finalizing n JOIN trellis_job a ON a.id = n.artifact
  JOIN trellis_finalizer f ON NOT f.completes AND f.lifecycle = a.lifecycle AND f.source = a.state
  WHERE n.job = new.job AND NOT EXISTS (SELECT 1 FROM trellis_restoring WHERE job = new.job);
  DELETE FROM trellis_finalizing WHERE job = new.job;
END;

CREATE INDEX trellis_submission_parent ON trellis_submission (parent) WHERE parent IS NOT NULL;

-- The lifecycles are loaded once more, with the table above.
DELETE FROM trellis_meta WHERE key = 'contract';
