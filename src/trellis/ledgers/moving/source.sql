-- What is read from an SQLite ledger that is moved. Every query has one of the same name in target.sql, which reads the
-- same columns from PostgreSQL, so that both can be compared; and one in write.sql, which writes them there. The first
-- columns are the key: the first parameters are the key of the last row that was read, the last one is the limit.
-- Numbers that differ between ledgers (types, actors, concurrency keys) are read as the names that they stand for.
-- Times are microseconds since 1970. temp.move_role says in which role an actor is known.

-- name: roles
CREATE TEMP TABLE IF NOT EXISTS move_role AS
SELECT a.id AS actor, coalesce(e.role, c.role, ?1) AS role FROM trellis_actor a
LEFT JOIN (SELECT actor, max(role) AS role FROM roles_of_events GROUP BY actor) e ON e.actor = a.id
LEFT JOIN (SELECT actor, max(role) AS role FROM trellis_act GROUP BY actor) c ON c.actor = a.id;

-- name: roles_of_events
CREATE TEMP TABLE IF NOT EXISTS roles_of_events AS SELECT DISTINCT role, actor FROM trellis_event;

-- name: actors
SELECT u.name, u.node, u.role FROM (
  SELECT a.name, a.node, e.role FROM roles_of_events e JOIN trellis_actor a ON a.id = e.actor
  UNION SELECT a.name, a.node, c.role FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor
  UNION SELECT a.name, a.node, w.role FROM trellis_wish w JOIN trellis_actor a ON a.id = w.actor
  UNION SELECT a.name, a.node, r.role FROM trellis_actor a JOIN move_role r ON r.actor = a.id
  UNION SELECT d.last_owner, '', ?4 FROM trellis_dead_letter d WHERE d.last_owner IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM trellis_actor a WHERE a.name = d.last_owner)
  UNION SELECT o.seen_by, '', ?4 FROM trellis_alert o WHERE o.seen_by <> ''
    AND NOT EXISTS (SELECT 1 FROM trellis_actor a WHERE a.name = o.seen_by)
) u WHERE (u.name, u.node, u.role) > (?1, ?2, ?3) ORDER BY u.name, u.node, u.role LIMIT ?5;

-- name: types
SELECT n.name, coalesce(c.paused, 0), c.rate, coalesce(c.burst, 1), coalesce(c.tokens, 0.0), nullif(c.filled_at, 0), c.held_max
FROM (SELECT name FROM trellis_job_type UNION SELECT name FROM trellis_type_control UNION SELECT name FROM trellis_type_options) n
LEFT JOIN trellis_type_control c ON c.name = n.name WHERE n.name > ?1 ORDER BY n.name LIMIT ?2;

-- name: type_options
SELECT o.lifecycle, o.name, o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed, o.compensation, o.unique_rule,
  o.rate_per_key, o.burst_per_key, r.role, a.name, a.node, o.changed_at
FROM trellis_type_options o JOIN trellis_actor a ON a.id = o.changed_by JOIN move_role r ON r.actor = a.id
WHERE (o.lifecycle, o.name) > (?1, ?2) ORDER BY o.lifecycle, o.name LIMIT ?3;

-- name: keys
SELECT k.name, iif(k.stopped, 0, k.slots), r.role, a.name, a.node
FROM trellis_concurrency_key k LEFT JOIN trellis_actor a ON a.id = k.changed_by LEFT JOIN move_role r ON r.actor = a.id
WHERE k.name > ?1 ORDER BY k.name LIMIT ?2;

-- When a key is looked at again is not moved: the sweep of the new ledger looks at every key.
-- name: key_rates
SELECT k.name, t.name, t.lifecycle, u.used_until FROM trellis_key_rate u JOIN trellis_concurrency_key k ON k.id = u.key
JOIN trellis_job_type t ON t.id = u.type WHERE (k.name, t.name, t.lifecycle) > (?1, ?2, ?3)
ORDER BY k.name, t.name, t.lifecycle LIMIT ?4;

-- name: jobs
SELECT j.id, j.lifecycle, t.name, j.state, min(j.place, 5), j.version, j.epoch, j.generation, j.attempt, j.prio,
  iif(j.place IN (1, 3), j.pos, NULL), j.max_attempts, j.deaths, iif(j.place = 4, (j.length + 999) / 1000, NULL),
  iif(j.place < 5, j.until, NULL),
  iif(j.owner IS NULL, NULL, coalesce((SELECT h.role FROM trellis_event h WHERE h.job = j.id AND h.actor = j.owner AND h.place = 4
    ORDER BY h.version DESC LIMIT 1), r.role)), a.name, a.node,
  iif(j.place = 2, j.due_at, NULL), j.deadline_at, iif(j.place = 4, j.cancel_at, NULL), k.name,
  iif(k.id IS NULL, NULL, coalesce(s.key_limit, k.slots)), j.slot, j.compensates, s.job_id, s.created_at, s.max_attempts, s.max_deaths,
  s.correlation, s.trace, s.parent, s.payload, s.deadline, s.compensates, iif(j.place >= 5, e.at, NULL)
FROM trellis_job j JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type JOIN trellis_event e ON e.seq = j.seq
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey LEFT JOIN trellis_actor a ON a.id = j.owner LEFT JOIN move_role r ON r.actor = j.owner
WHERE j.id > ?1 ORDER BY j.id LIMIT ?2;

-- name: events
SELECT e.seq, e.job, e.version, j.lifecycle, e.type, e.source, e.target, e.role, a.name, a.node, e.epoch, e.generation, e.attempt, e.at,
  iif(e.place = 2, e.at + e.wait, NULL), e.cause, e.data, e.request
FROM trellis_event e JOIN trellis_job j ON j.id = e.job JOIN trellis_actor a ON a.id = e.actor
WHERE e.seq > ?1 ORDER BY e.seq LIMIT ?2;

-- name: dead_letters
SELECT d.job, d.version, d.at, d.reason, d.stage, d.last_error, d.attempts, d.last_owner, d.last_lease_expires_at,
  coalesce(s.correlation, s.job_id),
  (SELECT n.at FROM trellis_event n WHERE n.job = d.job AND n.version > d.version
    AND (n.generation > e.generation OR n.type = (SELECT t.id FROM trellis_event_type t WHERE t.name = 'job_discarded')) ORDER BY n.version LIMIT 1)
FROM trellis_dead_letter d JOIN trellis_event e ON e.job = d.job AND e.version = d.version JOIN trellis_submission s ON s.id = d.job
WHERE (d.job, d.version) > (?1, ?2) ORDER BY d.job, d.version LIMIT ?3;

-- name: idempotency_keys
SELECT i.scope, i.key, i.job, i.fingerprint, i.at FROM trellis_idempotency i
WHERE (i.scope, i.key) > (?1, ?2) ORDER BY i.scope, i.key LIMIT ?3;

-- name: unique_jobs
SELECT u.job, u.type, u.scope, u.key, u.holds, u.unfinished, u.until, u.first_at, u.replaced FROM trellis_unique_job u
WHERE u.job > ?1 ORDER BY u.job LIMIT ?2;

-- name: results
SELECT r.job, r.body, r.expires_at, e.at FROM trellis_result r JOIN trellis_job j ON j.id = r.job JOIN trellis_event e ON e.seq = j.seq
WHERE r.job > ?1 ORDER BY r.job LIMIT ?2;

-- name: checkpoints
SELECT c.job, c.epoch, c.at, c.body FROM trellis_checkpoint c WHERE c.job > ?1 ORDER BY c.job LIMIT ?2;

-- name: journal
SELECT o.job, o.entry, o.epoch, o.at, o.body FROM trellis_journal o WHERE (o.job, o.entry) > (?1, ?2) ORDER BY o.job, o.entry LIMIT ?3;

-- name: signals
SELECT g.id, g.job, CASE g.type WHEN 'job_heartbeat' THEN 1 WHEN 'job_log' THEN 3 WHEN 'job_result_refused' THEN 4 END, g.at, g.data
FROM trellis_signal g WHERE g.type <> 'job_lease_renewed' AND g.id > ?1 ORDER BY g.id LIMIT ?2;

-- name: renewals
SELECT g.job, g.at FROM trellis_signal g WHERE g.type = 'job_lease_renewed' AND g.job > ?1 ORDER BY g.job LIMIT ?2;

-- name: job_signals
SELECT g.no, g.job, g.name, g.at, r.role, a.name, a.node, g.key, g.body
FROM trellis_job_signal g JOIN trellis_actor a ON a.id = g.actor JOIN move_role r ON r.actor = a.id
WHERE g.no > ?1 ORDER BY g.no LIMIT ?2;

-- name: spawned
SELECT s.child, s.parent, s.awaited, s.cancels, s.orphaned FROM trellis_spawned s
WHERE (s.child, s.parent) > (?1, ?2) ORDER BY s.child, s.parent LIMIT ?3;

-- name: suspensions
SELECT s.job, s.mode, s.signal, s.after FROM trellis_suspension s WHERE s.job > ?1 ORDER BY s.job LIMIT ?2;

-- name: cancel_requests
SELECT w.job, w.epoch, w.role, a.name, a.node, w.cause, coalesce(w.at, e.at)
FROM trellis_wish w JOIN trellis_actor a ON a.id = w.actor JOIN trellis_job j ON j.id = w.job JOIN trellis_event e ON e.seq = j.seq
WHERE w.job > ?1 ORDER BY w.job LIMIT ?2;

-- name: workers
SELECT w.name, r.role, a.node, w.seen_at, w.info FROM trellis_worker w JOIN trellis_actor a ON a.id = w.actor
JOIN move_role r ON r.actor = a.id WHERE w.name > ?1 ORDER BY w.name LIMIT ?2;

-- name: followers
SELECT f.name, f.epoch, r.role, a.name, a.node, f.until, f.place FROM trellis_follower f JOIN trellis_actor a ON a.id = f.actor
JOIN move_role r ON r.actor = a.id WHERE f.name > ?1 ORDER BY f.name LIMIT ?2;

-- name: acts
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation, c.published, c.job, c.facts
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.no > ?1 ORDER BY c.no LIMIT ?2;

-- name: request_keys
SELECT k.scope, k.key, k.at, k.fingerprint, k.about, k.answer FROM trellis_request_key k
WHERE (k.scope, k.key) > (?1, ?2) ORDER BY k.scope, k.key LIMIT ?3;

-- name: alerts
SELECT o.id, o.name, o.subject, o.value, o.text, o.raised_at, o.last_seen_at, o.resolved_at, o.seen_in, o.resolved_in, o.seen_by,
  nullif(o.unread_at, 0), trim(o.report_types)
FROM trellis_alert o WHERE o.id > ?1 ORDER BY o.id LIMIT ?2;

-- name: schedules
SELECT s.name, s.version, s.spec, s.on_topic, s.paused, s.owner, s.since, s.next_at, s.firing, s.last_at, s.last_job, s.skipped,
  r.role, a.name, a.node, s.changed_at
FROM trellis_schedule s JOIN trellis_actor a ON a.id = s.changed_by JOIN move_role r ON r.actor = a.id
WHERE s.name > ?1 ORDER BY s.name LIMIT ?2;

-- Positions of the feed are written otherwise on PostgreSQL. So the chain goes on as that of a rebuilt ledger does: with the next
-- number of a feed, and what the ledger has is sealed once more.
-- name: audit_head
SELECT h.one, h.number, h.sha256, h.feed + (h.place IS NOT NULL), h.at FROM trellis_audit_head h WHERE h.one > ?1 LIMIT ?2;

-- name: settings
SELECT m.key, CAST(m.value AS TEXT) FROM trellis_meta m
WHERE m.key IN ('home_issuer', 'alert_round', 'alert_evaluated_at', 'alert_stale_at', 'sweep_tick') AND m.key > ?1 ORDER BY m.key LIMIT ?2;

-- name: numbers
SELECT max(coalesce((SELECT max(id) FROM trellis_job), 0), coalesce((SELECT value FROM trellis_meta WHERE key = 'last_purged'), 0)),
  coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'trellis_event'), 0), coalesce((SELECT max(id) FROM trellis_signal), 0),
  coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'trellis_act'), 0),
  coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'trellis_job_signal'), 0);

-- The statements that close the ledger: for each table and kind of write a trigger with this message. The mark itself can be written.
-- name: closing
SELECT printf('CREATE TRIGGER IF NOT EXISTS trellis_moved_%s_%s BEFORE %s ON %s %s BEGIN SELECT raise(ABORT, %Q); END',
  substr(t.name, 9), w.value, w.value, t.name,
  iif(t.name = 'trellis_meta', 'WHEN ' || iif(w.value = 'insert', 'new', 'old') || '.key IS NOT ''move''', ''), ?1)
FROM sqlite_schema t, json_each('["insert", "update", "delete"]') w WHERE t.type = 'table' AND substr(t.name, 1, 8) = 'trellis_';

-- name: opening
SELECT printf('DROP TRIGGER %s', t.name) FROM sqlite_schema t WHERE t.type = 'trigger' AND substr(t.name, 1, 14) = 'trellis_moved_';

-- name: mark
SELECT value FROM trellis_meta WHERE key = 'move';

-- name: write_mark
INSERT INTO trellis_meta (key, value) VALUES ('move', ?1) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: remove_mark
DELETE FROM trellis_meta WHERE key = 'move';

-- name: rebuilding
SELECT 1 FROM trellis_follower WHERE place = 'rebuilding';

-- name: seen_lately
SELECT name FROM trellis_worker WHERE seen_at > (unixepoch('subsec') - 60) * 1000000 ORDER BY name LIMIT 5;
