-- What `trellis audit verify` compares: the records that blocks list, and where they were met. The file is temporary.

-- name: create_tables
-- `ord` is the place in the chains. `met` counts in how many places of the object store the record lies. `ts` is the time of an act.
CREATE TABLE sealed (
  ord INTEGER PRIMARY KEY, chain TEXT NOT NULL, block INTEGER NOT NULL, feed INTEGER NOT NULL, id TEXT NOT NULL, day TEXT NOT NULL,
  sha256 TEXT NOT NULL, position TEXT, job TEXT, met INTEGER NOT NULL DEFAULT 0, in_ledger INTEGER NOT NULL DEFAULT 0, ts TEXT
);
CREATE INDEX sealed_record ON sealed (id, day);

-- Records of the object store that no block has.
CREATE TABLE stray (key TEXT NOT NULL, id TEXT NOT NULL, day TEXT NOT NULL, sha256 TEXT NOT NULL, ts TEXT NOT NULL, line BLOB NOT NULL,
  lifecycle TEXT);
CREATE INDEX stray_record ON stray (id, day);

-- Jobs that retention removed from a ledger, with the place of its act in the chain. Later events of such an id are another job's.
CREATE TABLE removed (job TEXT NOT NULL, ord INTEGER NOT NULL);
CREATE INDEX removed_job ON removed (job, ord);

-- The range of sealed records that a segment holds. Ranges of one day do not overlap, unless a rebuild wrote the segment.
CREATE TABLE segment (key TEXT PRIMARY KEY, day TEXT NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL);
CREATE TABLE rebuilt (key TEXT PRIMARY KEY);

-- name: add_sealed
INSERT INTO sealed (chain, block, feed, id, day, sha256, position, job) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: find
SELECT ord, feed, met, position, chain FROM sealed WHERE id = ? AND day = ? AND sha256 = ? ORDER BY ord;

-- name: find_other
SELECT ord FROM sealed WHERE id = ? AND day = ? AND chain = ? ORDER BY ord LIMIT 1;

-- name: mark_met
UPDATE sealed SET met = met + 1 WHERE id = ? AND day = ? AND sha256 = ?;

-- name: mark_in_ledger
UPDATE sealed SET in_ledger = 1 WHERE id = ? AND day = ? AND sha256 = ? AND chain = ?;

-- name: add_stray
INSERT INTO stray (key, id, day, sha256, ts, line, lifecycle) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: strays_of
SELECT key, line FROM stray WHERE id = ? AND day = ? LIMIT 1;

-- name: forget_stray
DELETE FROM stray WHERE id = ? AND day = ? AND sha256 = ?;

-- name: any_stray
SELECT 1 FROM stray LIMIT 1;

-- Records that cannot be judged: no block lists their event, and they are older than the chain or of a ledger that was not read.
-- name: count_unproven
SELECT count(*) FROM stray s WHERE (s.ts < :late OR s.lifecycle = :elsewhere)
  AND NOT EXISTS (SELECT 1 FROM sealed o WHERE o.id = s.id AND o.day = s.day);

-- Of these the ones that are older than the chain.
-- name: unproven
SELECT s.id, s.day, s.sha256 FROM stray s WHERE s.ts < :late AND s.lifecycle IS NOT :elsewhere
  AND NOT EXISTS (SELECT 1 FROM sealed o WHERE o.id = s.id AND o.day = s.day) ORDER BY s.id, s.day, s.sha256;

-- All others.
-- name: strays
SELECT key, id, ord FROM (
  SELECT s.key, s.id, s.ts, s.lifecycle, (SELECT min(o.ord) FROM sealed o WHERE o.id = s.id AND o.day = s.day) AS ord FROM stray s)
WHERE ord IS NOT NULL OR NOT (ts < :late OR lifecycle IS NOT NULL AND lifecycle IS :elsewhere) ORDER BY key LIMIT :limit;

-- name: add_removed
INSERT INTO removed (job, ord) VALUES (?, ?);

-- A record that blocks of several ledgers list is missing once.
-- name: missing_objects
SELECT min(ord), id FROM sealed GROUP BY id, day, sha256 HAVING max(met) = 0 ORDER BY min(ord) LIMIT ?;

-- name: missing_events
SELECT s.ord, s.id FROM sealed s WHERE s.chain = ? AND s.feed = ? AND s.position IS NOT NULL AND s.in_ledger = 0
  AND NOT EXISTS (SELECT 1 FROM removed r WHERE r.job = s.job AND r.ord > s.ord) ORDER BY s.ord LIMIT ?;

-- name: note_act
UPDATE sealed SET ts = ? WHERE id = ? AND day = ? AND sha256 = ?;

-- Retention removes acts by age, and records up to which. The time of an act whose record is missing is not known; that record is
-- reported.
-- name: missing_acts
SELECT s.ord, s.id FROM sealed s WHERE s.chain = :chain AND s.feed = :feed AND s.position IS NULL AND s.in_ledger = 0
  AND s.ts > :before ORDER BY s.ord LIMIT :limit;

-- name: record_at
SELECT id, day, sha256, position, block FROM sealed WHERE ord = ?;

-- name: forget_stray_at
DELETE FROM stray WHERE key = ? AND id = ?;

-- name: add_segment
INSERT INTO segment (key, day, low, high) VALUES (?, ?, ?, ?);

-- name: add_rebuilt
INSERT OR IGNORE INTO rebuilt (key) VALUES (?);

-- name: overlapping
SELECT o.key, o.low FROM (SELECT key, low, lag(high) OVER (PARTITION BY day ORDER BY low) AS before FROM segment
  WHERE key NOT IN (SELECT key FROM rebuilt)) o WHERE o.low < o.before ORDER BY o.low LIMIT ?;
