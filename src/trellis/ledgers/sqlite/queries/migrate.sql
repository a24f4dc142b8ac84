-- The schema version of a file.

-- name: has_meta
SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'trellis_meta';

-- name: read_version
SELECT value FROM trellis_meta WHERE key = 'schema_version';

-- name: write_version
INSERT INTO trellis_meta (key, value) VALUES ('schema_version', ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- A restore is one transaction, so a marker found when a ledger is opened is a leftover of another writer.
-- name: nothing_is_restored
DELETE FROM trellis_restoring;

-- name: nobody_restores
DELETE FROM trellis_meta WHERE key = 'restoring';
