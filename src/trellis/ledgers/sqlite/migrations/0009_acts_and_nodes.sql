-- Administrative acts: what people and components change that is no step of a job. An act is written in the transaction that makes the
-- change, and stays until the projector has published its audit record and retention removes it.
CREATE TABLE trellis_act (
  no INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  at INTEGER NOT NULL,
  role INTEGER NOT NULL,
  actor INTEGER NOT NULL,
  event TEXT NOT NULL,
  subject TEXT NOT NULL,
  source TEXT,
  target TEXT,
  cause TEXT,
  correlation TEXT,
  published INTEGER NOT NULL DEFAULT 0 CHECK (published IN (0, 1))
) STRICT;
CREATE INDEX trellis_act_unpublished ON trellis_act (no) WHERE published = 0;
CREATE TRIGGER trellis_act_stays_as_it_is
BEFORE UPDATE OF no, id, at, role, actor, event, subject, source, target, cause, correlation ON trellis_act BEGIN
  SELECT RAISE(ABORT, 'an administrative act never changes');
END;

-- The machine that an actor wrote from. The same name may write from several.
CREATE TABLE trellis_actor_on_node (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, node TEXT NOT NULL DEFAULT '', UNIQUE (name, node)
) STRICT;
INSERT INTO trellis_actor_on_node (id, name) SELECT id, name FROM trellis_actor;
DROP TABLE trellis_actor;
ALTER TABLE trellis_actor_on_node RENAME TO trellis_actor;
