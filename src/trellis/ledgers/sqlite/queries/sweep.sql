-- Items that fall due. The columns of a job's row come first, then what the decision needs.

-- name: last_tick
SELECT value FROM trellis_meta WHERE key = 'sweep_tick';

-- name: write_tick
INSERT INTO trellis_meta (key, value) VALUES ('sweep_tick', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- True when nothing is held or parked, and nothing falls due before :soon.
-- name: is_quiet
SELECT NOT EXISTS (SELECT 1 FROM trellis_job WHERE place = 3) AND NOT EXISTS (SELECT 1 FROM trellis_job WHERE place = 4)
  AND NOT EXISTS (SELECT 1 FROM trellis_job WHERE place = 2 AND due_at IS NOT NULL AND due_at <= :soon)
  AND NOT EXISTS (SELECT 1 FROM trellis_job WHERE deadline_at <= :soon AND deadline_at IS NOT NULL AND place < 5)
  AND NOT EXISTS (SELECT 1 FROM trellis_spawned WHERE orphaned = 1);

-- A lease renewed after the last sweep (its end minus its length) had no outage before the renewal.
-- name: amnesty
UPDATE trellis_job SET until = :now + length
WHERE place = 4 AND length < 2 * (:now - max(:last, until - length)) AND :now - max(:last, until - length) > :late
  AND until < :now + length;

-- name: overdue_cancels
SELECT id FROM trellis_job WHERE place = 4 AND cancel_at <= ? ORDER BY cancel_at LIMIT ?;

-- name: expired
SELECT j.id, s.max_deaths FROM trellis_job j JOIN trellis_submission s ON s.id = j.id
WHERE j.place = 4 AND j.until <= ? ORDER BY j.until LIMIT ?;

-- name: due
SELECT id FROM trellis_job WHERE place = 2 AND due_at <= ? ORDER BY due_at LIMIT ?;

-- name: past_deadline
SELECT id FROM trellis_job WHERE deadline_at <= :now AND deadline_at IS NOT NULL AND place < 5
  AND lifecycle * 16 + state IN (SELECT value FROM json_each(:states)) ORDER BY deadline_at LIMIT :limit;

-- name: count_death
UPDATE trellis_job SET deaths = deaths + 1 WHERE id = ?;

-- name: lose_in_place
UPDATE trellis_job SET epoch = epoch + 1, place = ?, slot = NULL, length = NULL, cancel_at = NULL WHERE id = ?;

-- A position behind all jobs that are ready now. No event gets its number, so that a job that becomes ready later is
-- behind it. Jobs that fall due together share the position; the older id is first.
-- name: take_position
UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'trellis_event' RETURNING seq;

-- name: goes_behind
UPDATE trellis_job SET pos = ? WHERE id = ?;

-- name: becomes_claimable
UPDATE trellis_job SET place = ?, pos = ?, due_at = NULL WHERE id = ?;

-- name: rests_on
UPDATE trellis_job SET due_at = NULL WHERE id = ?;

-- The next keys with parked jobs, and whether each waits for a token that is not due. Reads one row of each key.
-- name: keys_with_parked
WITH RECURSIVE keys (ckey) AS (
  SELECT (SELECT min(ckey) FROM trellis_job INDEXED BY trellis_job_parked WHERE place = 3 AND ckey > :after)
  UNION ALL SELECT (SELECT min(j.ckey) FROM trellis_job j INDEXED BY trellis_job_parked WHERE j.place = 3 AND j.ckey > keys.ckey)
  FROM keys WHERE ckey IS NOT NULL LIMIT :limit)
SELECT ckey, EXISTS (SELECT 1 FROM trellis_concurrency_key k WHERE k.id = ckey AND k.due_at > :now) FROM keys WHERE ckey IS NOT NULL;

-- name: next_due
SELECT min(at) FROM (
  SELECT min(until) AS at FROM trellis_job WHERE place = 4
  UNION ALL SELECT min(due_at) FROM trellis_job WHERE place = 2 AND due_at IS NOT NULL
  UNION ALL SELECT min(cancel_at) FROM trellis_job WHERE place = 4 AND cancel_at IS NOT NULL
  UNION ALL SELECT min(deadline_at) FROM trellis_job WHERE deadline_at > ? AND deadline_at IS NOT NULL AND place < 5
  UNION ALL SELECT max(min(due_at), ?) FROM trellis_concurrency_key WHERE due_at IS NOT NULL);

-- name: healed_up_to
SELECT value FROM trellis_meta WHERE key = 'healed_up_to';

-- name: write_healed
INSERT INTO trellis_meta (key, value) VALUES ('healed_up_to', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;
