-- Claims. Places: 1 ready, 4 held.

-- name: ready_of_type
SELECT prio, pos, id FROM trellis_job INDEXED BY trellis_job_ready WHERE place = 1 AND type = ?
  AND (deaths = 0 OR id NOT IN (SELECT value FROM json_each(?))) ORDER BY prio, pos LIMIT ?;

-- name: ready_of_class
SELECT pos, id, type FROM trellis_job INDEXED BY trellis_job_ready WHERE place = 1 AND type = ? AND prio = ?
  AND (deaths = 0 OR id NOT IN (SELECT value FROM json_each(?))) ORDER BY pos LIMIT ?;

-- name: ready_job
SELECT id FROM trellis_job WHERE id = ? AND place = 1 AND (deaths = 0 OR id NOT IN (SELECT value FROM json_each(?))) LIMIT ?;

-- name: died_and_claimable_or_held
SELECT j.id, j.type, j.place, j.prio, j.pos, j.deaths, s.max_deaths, j.attempt, j.max_attempts
FROM trellis_job j INDEXED BY trellis_job_died JOIN trellis_submission s ON s.id = j.id
WHERE j.deaths > 0 AND j.place IN (1, 4) AND j.lifecycle = ?;

-- name: to_claim
SELECT j.id, j.type, j.state, j.version, j.epoch, j.generation, j.attempt, j.max_attempts, j.deaths, j.deadline_at,
  s.job_id, s.correlation, s.trace, s.parent, s.payload, o.job_id, c.body, j.place, j.owner, s.max_deaths,
  j.max_attempts - s.max_attempts
FROM json_each(?) AS wanted JOIN trellis_job j ON j.id = wanted.value JOIN trellis_submission s ON s.id = j.id
LEFT JOIN trellis_checkpoint c ON c.job = j.id LEFT JOIN trellis_submission o ON o.id = j.compensates
ORDER BY wanted.key;

-- name: take_over
UPDATE trellis_job SET place = 4, epoch = epoch + 1, length = ?, until = ?, owner = ?
WHERE id IN (SELECT value FROM json_each(?));

-- name: claim_before
SELECT leases FROM trellis_claim WHERE claim_id = ?;

-- name: record_claim
INSERT INTO trellis_claim (claim_id, at, leases) VALUES (?, ?, ?);

-- name: controls
SELECT name, paused, rate, burst, tokens, filled_at, held_max FROM trellis_type_control;

-- name: held_of_type
SELECT count(*) FROM trellis_job WHERE place = 4 AND type IN (SELECT id FROM trellis_job_type WHERE name = ?);

-- name: spend_tokens
UPDATE trellis_type_control SET tokens = ?, filled_at = ? WHERE name = ?;
