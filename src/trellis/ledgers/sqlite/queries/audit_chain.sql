-- The newest block of the audit chain. It is replaced only while it is the expected one, so that the chain cannot fork.

-- name: head
SELECT number, sha256, place, feed, at FROM trellis_audit_head;

-- name: write_head
INSERT INTO trellis_audit_head (one, number, sha256, place, feed, at) VALUES (1, ?, ?, ?, ?, ?)
ON CONFLICT (one) DO UPDATE SET number = excluded.number, sha256 = excluded.sha256, place = excluded.place, feed = excluded.feed, at = excluded.at;

-- name: mark_sealed
UPDATE trellis_act SET sealed = 1 WHERE no = ?;
