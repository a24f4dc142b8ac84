-- Administrative acts. Those with `published` 0 wait for the projector.

-- An existing act with the caller's own id stays unchanged.
-- name: add
INSERT INTO trellis_act (id, at, role, actor, event, subject, source, target, cause, correlation, job, facts)
VALUES (coalesce(:id, 'act-' || lower(hex(randomblob(16)))), :at, :role, :actor, :event, :subject, :source, :target, :cause, :correlation,
        :job, :facts)
ON CONFLICT (id) DO NOTHING RETURNING id;

-- name: put_back
INSERT INTO trellis_act (id, at, role, actor, event, subject, source, target, cause, correlation, job, facts, published)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING;

-- name: read
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation, c.job, c.facts
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.no > ? ORDER BY c.no LIMIT ?;

-- name: read_unpublished
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation, c.job, c.facts
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.published = 0 AND c.no > ? ORDER BY c.no LIMIT ?;

-- name: read_unsealed
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation, c.job, c.facts
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.sealed = 0 AND c.published = 1 AND c.no > ? ORDER BY c.no LIMIT ?;

-- name: mark_published
UPDATE trellis_act SET published = 1 WHERE no = ?;

-- The newest block of the audit chain. It is replaced only while it is the expected one, so that the chain cannot fork.
-- name: head
SELECT number, sha256, place, feed, at FROM trellis_audit_head;

-- name: write_head
INSERT INTO trellis_audit_head (one, number, sha256, place, feed, at) VALUES (1, ?, ?, ?, ?, ?)
ON CONFLICT (one) DO UPDATE SET number = excluded.number, sha256 = excluded.sha256, place = excluded.place, feed = excluded.feed, at = excluded.at;

-- name: mark_sealed
UPDATE trellis_act SET sealed = 1 WHERE no = ?;
