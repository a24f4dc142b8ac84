-- Idempotency keys of requests that change existing jobs.

-- name: find
SELECT fingerprint, about, answer FROM trellis_request_key WHERE scope = ? AND key = ?;

-- name: add
INSERT INTO trellis_request_key (scope, key, at, fingerprint, about) VALUES (?, ?, ?, ?, ?);

-- The first answer stays.
-- name: store_answer
UPDATE trellis_request_key SET answer = ? WHERE scope = ? AND key = ? AND answer IS NULL;

-- name: drop_old
DELETE FROM trellis_request_key WHERE (scope, key) IN (SELECT scope, key FROM trellis_request_key WHERE at <= ? ORDER BY at LIMIT ?);
