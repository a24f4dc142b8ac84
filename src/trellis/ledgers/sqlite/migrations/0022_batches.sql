-- A job may be of several batches, and the child of a job besides: `spawned` has a row for each job that waits for it.
ALTER TABLE trellis_spawned RENAME TO trellis_spawned_before;
CREATE TABLE trellis_spawned (
  child INTEGER NOT NULL, parent INTEGER NOT NULL, awaited INTEGER NOT NULL DEFAULT 0 CHECK (awaited IN (0, 1)),
  cancels INTEGER NOT NULL CHECK (cancels IN (0, 1)), orphaned INTEGER NOT NULL DEFAULT 0 CHECK (orphaned IN (0, 1)),
  PRIMARY KEY (child, parent)
) STRICT, WITHOUT ROWID;
INSERT INTO trellis_spawned (child, parent, awaited, cancels, orphaned)
SELECT child, parent, awaited, cancels, orphaned FROM trellis_spawned_before;
DROP TABLE trellis_spawned_before;
CREATE INDEX trellis_spawned_parent ON trellis_spawned (parent, awaited);
CREATE INDEX trellis_spawned_orphaned ON trellis_spawned (child) WHERE orphaned = 1;
