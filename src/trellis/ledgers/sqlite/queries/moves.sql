-- Steps by roles that hold no lease.

-- name: made_before
SELECT version, source, target, epoch FROM trellis_event WHERE job = ? AND request = ? ORDER BY version DESC LIMIT 1;

-- name: jobs_of_request
SELECT DISTINCT e.job FROM trellis_event e WHERE e.request = ? AND e.type = ? ORDER BY e.seq;

-- name: ask_to_cancel
UPDATE trellis_job SET cancel_at = ? WHERE id = ?;

-- name: remember_wish
INSERT INTO trellis_wish (job, epoch, role, actor, cause, at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (job) DO UPDATE SET epoch = excluded.epoch, role = excluded.role, actor = excluded.actor, cause = excluded.cause,
  at = excluded.at;

-- name: wish
SELECT a.name, w.role, w.cause, w.at FROM trellis_wish w JOIN trellis_actor a ON a.id = w.actor WHERE w.job = ? AND w.epoch = ?;

-- The ended or resting jobs that a requeue with a filter selects, oldest first. `states` are lifecycle * 16 + state.
-- name: requeueable
SELECT j.id FROM trellis_job j JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey
WHERE j.place IN (2, 6) AND j.lifecycle * 16 + j.state IN (SELECT value FROM json_each(:states))
  AND (:lifecycle IS NULL OR j.lifecycle = :lifecycle)
  AND (:type IS NULL OR t.name = :type)
  AND (:correlation IS NULL OR coalesce(s.correlation, s.job_id) = :correlation)
  AND (:key IS NULL OR k.name = :key)
  AND (:parent IS NULL OR s.parent = :parent)
  AND (:place IS NULL OR min(j.place, 5) = :place)
  AND (:reason IS NULL OR EXISTS (
    SELECT 1 FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version AND d.reason = :reason))
ORDER BY j.id LIMIT :limit;
