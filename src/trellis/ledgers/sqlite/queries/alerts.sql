-- Alerts, and what is read for them alone.

-- name: open_alerts
SELECT id, name, subject, value, text, raised_at, last_seen_at, resolved_at FROM trellis_alert
WHERE resolved_at IS NULL ORDER BY raised_at DESC, id LIMIT ?;

-- name: resolved_alerts
SELECT id, name, subject, value, text, raised_at, last_seen_at, resolved_at FROM trellis_alert
WHERE resolved_at IS NOT NULL ORDER BY resolved_at DESC, id LIMIT ?;

-- name: alert
SELECT id, name, subject, value, text, raised_at, last_seen_at, resolved_at FROM trellis_alert WHERE id = ?;

-- name: mark
SELECT coalesce((SELECT value FROM trellis_meta WHERE key = 'alert_round'), 0),
  EXISTS (SELECT 1 FROM trellis_alert WHERE resolved_at IS NULL),
  (SELECT coalesce(group_concat(report_types, ' '), '') FROM
    (SELECT DISTINCT report_types FROM trellis_alert WHERE resolved_at IS NOT NULL AND report_types <> '')),
  (SELECT value FROM trellis_meta WHERE key = 'alert_evaluated_at'), (SELECT value FROM trellis_meta WHERE key = 'alert_stale_at');

-- name: next_round
INSERT INTO trellis_meta (key, value) VALUES ('alert_round', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1 RETURNING value;

-- The latest round says when it is out of date, also if a round before it has named a later time.
-- name: evaluated
INSERT INTO trellis_meta (key, value)
SELECT key, value FROM (SELECT 'alert_evaluated_at' AS key, :now AS value UNION ALL SELECT 'alert_stale_at', :now + :stale)
WHERE NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'alert_evaluated_at' AND value > :now)
ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: observers
SELECT id, seen_in, seen_by, unread_at FROM trellis_alert WHERE resolved_at IS NULL;

-- name: not_read
UPDATE trellis_alert SET unread_at = ? WHERE id = ?;

-- Alerts whose beginning or end is to be reported: those that are open, those that this round has resolved, and those that ended after their
-- beginning was reported.
-- name: to_report
SELECT id, report_types FROM trellis_alert
WHERE resolved_at IS NULL OR (resolved_at = :now AND resolved_in = :round) OR (resolved_at IS NOT NULL AND report_types <> '');

-- name: reported
UPDATE trellis_alert SET report_types = ? WHERE id = ?;

-- name: see
UPDATE trellis_alert SET value = :value, text = :text, last_seen_at = :now, seen_in = :round, seen_by = :by WHERE id = :open_id;

-- A cause that somebody found to be over after this round had read it is not raised again.
-- name: raise_alert
INSERT INTO trellis_alert (id, name, subject, value, text, raised_at, last_seen_at, seen_in, seen_by)
SELECT :id, :name, :subject, :value, :text, :now, :now, :round, :by
WHERE NOT EXISTS (SELECT 1 FROM trellis_alert WHERE resolved_in > :mark AND name = :name AND subject = :subject)
ON CONFLICT DO NOTHING
RETURNING id, name, subject, value, text, raised_at, last_seen_at, resolved_at;

-- name: resolve
UPDATE trellis_alert SET resolved_at = ?, resolved_in = ? WHERE id = ?
RETURNING id, name, subject, value, text, raised_at, last_seen_at, resolved_at;

-- name: drop_resolved
DELETE FROM trellis_alert WHERE id IN (
  SELECT id FROM trellis_alert INDEXED BY trellis_alert_resolved WHERE resolved_at <= ? ORDER BY resolved_at LIMIT ?);

-- When the job that has waited longest became claimable, by type: the first of each priority, and for queue jobs also the first of those
-- that wait for the slot of their agent.
-- name: waiting_since
SELECT t.name, t.lifecycle, (SELECT e.at FROM trellis_event e WHERE e.seq <= (SELECT min(first) FROM (
    SELECT (SELECT j.pos FROM trellis_job j INDEXED BY trellis_job_ready
      WHERE j.place = 1 AND j.type = t.id AND j.prio = p.value ORDER BY j.pos LIMIT 1) AS first
    FROM json_each('[0,1,2]') p
    UNION ALL
    SELECT (SELECT j.pos FROM trellis_job j INDEXED BY trellis_job_queue_parked
      WHERE j.place = 3 AND j.lifecycle = 2 AND j.type = t.id ORDER BY j.pos LIMIT 1) WHERE t.lifecycle = 2
  )) ORDER BY e.seq DESC LIMIT 1) AS since
FROM trellis_job_type t WHERE since IS NOT NULL ORDER BY since LIMIT ?;

-- How queue jobs left a stage, of one type of step. Newest first. The condition is that of the index, word for word.
-- name: stage_steps
SELECT s.job_id, j.lifecycle, coalesce(s.correlation, s.job_id), e.version, e.type, e.source, e.target, e.role, a.name,
  e.epoch, e.generation, e.attempt, e.at, e.cause, e.data, e.seq, a.node
FROM trellis_event e INDEXED BY trellis_event_stage
JOIN trellis_job j ON j.id = e.job JOIN trellis_submission s ON s.id = e.job JOIN trellis_actor a ON a.id = e.actor
WHERE e.type = ? AND ((e.type = 9 AND e.target = 7) OR e.type = 15 OR (e.type = 4 AND e.source = 5))
ORDER BY e.seq DESC LIMIT ?;
