-- Retention. Ended jobs are found by walking the history from where the last pass stopped. An event that is the last of
-- its job, and ended it long enough ago, marks a job to remove. A job whose idempotency key must still answer is
-- skipped and checked again after that.

-- name: position
SELECT value FROM trellis_meta WHERE key = 'retained_up_to';

-- name: write_position
INSERT INTO trellis_meta (key, value) VALUES ('retained_up_to', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- How far every subscriber that retention waits for has read. A place begins with a position; any other place is before
-- all events.
-- name: read_up_to
SELECT min(CAST(place AS INTEGER)) FROM trellis_follower WHERE place NOT LIKE '!%';

-- Whether the audit chain seals this ledger: it has begun, or a projector, which begins it, follows the feed and is waited for.
-- name: is_sealed
SELECT EXISTS (SELECT 1 FROM trellis_audit_head) OR EXISTS (SELECT 1 FROM trellis_follower WHERE name = ? AND place NOT LIKE '!%');

-- name: next_events
SELECT e.seq, e.at, iif(j.seq = e.seq AND j.place >= 5, j.id, NULL), j.version, j.lifecycle * 16 + j.state,
  (SELECT s.job_id FROM trellis_submission s WHERE s.id = j.id),
  EXISTS (SELECT 1 FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version),
  (SELECT count(*) FROM trellis_idempotency i WHERE i.job = j.id),
  (SELECT max(i.at) FROM trellis_idempotency i WHERE i.job = j.id)
FROM trellis_event e JOIN trellis_job j ON j.id = e.job WHERE e.seq > ? ORDER BY e.seq LIMIT ?;

-- name: keep
INSERT INTO trellis_kept (job, until) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET until = excluded.until;

-- name: kept
SELECT k.job, j.place, e.seq, e.at, j.version, j.lifecycle * 16 + j.state,
  (SELECT s.job_id FROM trellis_submission s WHERE s.id = j.id),
  EXISTS (SELECT 1 FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version),
  (SELECT count(*) FROM trellis_idempotency i WHERE i.job = j.id),
  (SELECT max(i.at) FROM trellis_idempotency i WHERE i.job = j.id)
FROM trellis_kept k JOIN trellis_job j ON j.id = k.job JOIN trellis_event e ON e.seq = j.seq WHERE k.until <= ? ORDER BY k.until LIMIT ?;

-- name: forget_kept
DELETE FROM trellis_kept WHERE job = ?;

-- The walk begins again, and every skipped job is checked again.
-- name: forget_position
DELETE FROM trellis_meta WHERE key = 'retained_up_to';

-- name: check_kept_now
UPDATE trellis_kept SET until = 0 WHERE until > 0;

-- Every ended job with what may hold it back. `:sealed` is NULL where nothing seals this ledger, `:read` where nobody is waited for.
-- name: plan
SELECT j.lifecycle * 16 + j.state AS code, count(*), min(e.at), e.at <= :now - a.value ->> 1 AS over,
  EXISTS (SELECT 1 FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version) AND NOT a.value ->> 2 AS letter,
  EXISTS (SELECT 1 FROM trellis_idempotency i WHERE i.job = j.id AND i.at > :keys_from) AS keyed,
  :sealed IS NOT NULL AND e.seq > :sealed AS unsealed,
  :read IS NOT NULL AND e.seq > :read AND e.at > :now - a.value ->> 1 - :unread AS unread
FROM trellis_job j JOIN trellis_event e ON e.seq = j.seq JOIN json_each(:ages) a ON a.value ->> 0 = j.lifecycle * 16 + j.state
WHERE j.place >= 5 GROUP BY code, over, letter, keyed, unsealed, unread;

-- name: purge
INSERT INTO trellis_purge (job) VALUES (?);

-- name: drop_results
DELETE FROM trellis_result WHERE job IN (SELECT job FROM trellis_result WHERE expires_at <= ? ORDER BY expires_at LIMIT ?);

-- name: drop_signals
DELETE FROM trellis_signal WHERE at <= :before AND id IN (SELECT id FROM trellis_signal ORDER BY id LIMIT :limit);

-- name: keys_pruned_up_to
SELECT value FROM trellis_meta WHERE key = 'keys_pruned_up_to';

-- name: write_keys_pruned
INSERT INTO trellis_meta (key, value) VALUES ('keys_pruned_up_to', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: next_keys
SELECT id FROM trellis_concurrency_key WHERE id > ? ORDER BY id LIMIT ?;

-- A key whose limit an operator set stays, even while no job uses it. So does one that has used tokens of the time to come.
-- name: drop_unused_keys
DELETE FROM trellis_concurrency_key WHERE id > ? AND id <= ? AND changed_by IS NULL
  AND NOT EXISTS (SELECT 1 FROM trellis_key_rate r WHERE r.key = trellis_concurrency_key.id AND r.used_until > ?)
  AND NOT EXISTS (SELECT 1 FROM trellis_job j INDEXED BY trellis_job_of_key WHERE j.ckey = trellis_concurrency_key.id);

-- name: drop_claims
DELETE FROM trellis_claim WHERE claim_id IN (SELECT claim_id FROM trellis_claim WHERE at <= ? ORDER BY at LIMIT ?);

-- name: old_acts
SELECT no, event FROM trellis_act WHERE no IN (SELECT no FROM trellis_act ORDER BY no LIMIT :limit)
  AND at <= :before AND (published OR at <= :unread_before) AND (sealed OR NOT :is_sealed);

-- name: drop_act
DELETE FROM trellis_act WHERE no = ?;

-- name: drop_workers
DELETE FROM trellis_worker WHERE seen_at <= ?;
