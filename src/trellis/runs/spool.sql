-- Records on their way from the object store to a ledger, or only their ids: sorted on disk, because nobody knows how many there are.

-- name: create_records
CREATE TABLE record (job TEXT NOT NULL, version INTEGER NOT NULL, at TEXT NOT NULL, body BLOB, PRIMARY KEY (job, version)) WITHOUT ROWID;

-- name: create_jobs
CREATE INDEX record_first ON record (at, job) WHERE version = 1;

-- name: create_keys
CREATE TABLE taken (scope TEXT NOT NULL, key TEXT NOT NULL, job TEXT NOT NULL, at TEXT NOT NULL, PRIMARY KEY (scope, key)) WITHOUT ROWID;

-- name: create_damage
CREATE TABLE damage (job TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;

-- An id that was used again, after its first job had been removed, has two lives: the later one counts.
-- name: add_record
INSERT INTO record (job, version, at, body) VALUES (?, ?, ?, ?)
ON CONFLICT (job, version) DO UPDATE SET at = excluded.at, body = excluded.body WHERE excluded.at > at;

-- name: differing
SELECT 1 FROM record WHERE job = ? AND version = ? AND at = ? AND body <> ?;

-- name: add_damage
INSERT INTO damage (job, reason) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: damage_of
SELECT reason FROM damage WHERE job = ?;

-- name: is_there
SELECT 1 FROM record WHERE job = ? AND version = ?;

-- name: count_records
SELECT count(*) FROM record;

-- name: next_jobs
SELECT at, job FROM record WHERE version = 1 AND (at, job) > (?, ?) ORDER BY at, job LIMIT ?;

-- name: headless
SELECT DISTINCT r.job FROM record r WHERE r.job > ? AND NOT EXISTS (SELECT 1 FROM record f WHERE f.job = r.job AND f.version = 1)
ORDER BY r.job LIMIT ?;

-- name: records_of
SELECT body FROM record WHERE job = ? AND at >= (SELECT f.at FROM record f WHERE f.job = record.job AND f.version = 1) ORDER BY version;

-- The last job that asked under a key has it: the ones before it had been removed.
-- name: take_key
INSERT INTO taken (scope, key, job, at) VALUES (?, ?, ?, ?)
ON CONFLICT (scope, key) DO UPDATE SET job = excluded.job, at = excluded.at WHERE excluded.at > at;

-- name: owner_of_key
SELECT job FROM taken WHERE scope = ? AND key = ?;
