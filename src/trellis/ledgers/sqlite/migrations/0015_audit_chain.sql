-- The newest block of the audit chain, whose blocks are objects of the object store. One row: it is replaced only by the block after it.
-- An act is `sealed` when a block has its audit record.
CREATE TABLE trellis_audit_head (
  one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL CHECK (number >= 0), sha256 TEXT NOT NULL CHECK (length(sha256) = 64),
  place TEXT, feed INTEGER NOT NULL CHECK (feed >= 1), at INTEGER NOT NULL
) STRICT;
ALTER TABLE trellis_act ADD COLUMN sealed INTEGER NOT NULL DEFAULT 0 CHECK (sealed IN (0, 1));
CREATE INDEX trellis_act_unsealed ON trellis_act (no) WHERE sealed = 0;
