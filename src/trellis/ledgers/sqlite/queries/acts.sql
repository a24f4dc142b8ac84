-- Administrative acts. Those with `published` 0 wait for the projector.

-- name: add
INSERT INTO trellis_act (id, at, role, actor, event, subject, source, target, cause, correlation)
VALUES ('act-' || lower(hex(randomblob(16))), :at, :role, :actor, :event, :subject, :source, :target, :cause, :correlation) RETURNING id;

-- name: put_back
INSERT INTO trellis_act (id, at, role, actor, event, subject, source, target, cause, correlation, published)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING;

-- name: read
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.no > ? ORDER BY c.no LIMIT ?;

-- name: read_unpublished
SELECT c.no, c.id, c.at, c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause, c.correlation
FROM trellis_act c JOIN trellis_actor a ON a.id = c.actor WHERE c.published = 0 AND c.no > ? ORDER BY c.no LIMIT ?;

-- name: mark_published
UPDATE trellis_act SET published = 1 WHERE no = ?;
