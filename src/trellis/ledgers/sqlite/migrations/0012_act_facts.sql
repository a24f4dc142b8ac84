-- An act names the job that it follows from, if one does, and says what else its audit record shows (JSON).
ALTER TABLE trellis_act ADD COLUMN job TEXT;
ALTER TABLE trellis_act ADD COLUMN facts TEXT;
DROP TRIGGER trellis_act_stays_as_it_is;
CREATE TRIGGER trellis_act_stays_as_it_is
BEFORE UPDATE OF no, id, at, role, actor, event, subject, source, target, cause, correlation, job, facts ON trellis_act BEGIN
  SELECT RAISE(ABORT, 'an administrative act never changes');
END;
