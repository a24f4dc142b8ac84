-- Records on their way from the object store to a ledger, or only whose they are: sorted on disk, because nobody knows how many there are.
-- A life is one job: an id that is used again, after its job was removed, begins another. It is named by the moment of its submit, which
-- every record carries; nothing here tells by the clock which of two records is the later one.

-- name: create_tables
CREATE TABLE record (
  job TEXT NOT NULL, life TEXT NOT NULL, version INTEGER NOT NULL, at TEXT NOT NULL, body BLOB, PRIMARY KEY (job, life, version)
) WITHOUT ROWID;
CREATE TABLE life (
  job TEXT NOT NULL, life TEXT NOT NULL, version INTEGER NOT NULL, ended INTEGER NOT NULL, PRIMARY KEY (life, job)
) WITHOUT ROWID;
CREATE INDEX lives_of_job ON life (job);
CREATE TABLE asked (
  scope TEXT NOT NULL, key TEXT NOT NULL, job TEXT NOT NULL, life TEXT NOT NULL, PRIMARY KEY (scope, key, job, life)
) WITHOUT ROWID;
CREATE INDEX asked_by_job ON asked (job, life);
CREATE TABLE damage (job TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE act (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;

-- name: add_act
INSERT INTO act (id, body) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: next_acts
SELECT id, body FROM act WHERE id > ? ORDER BY id LIMIT ?;

-- name: add_record
INSERT INTO record (job, life, version, at, body) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: differing
SELECT 1 FROM record WHERE job = ? AND life = ? AND version = ? AND body <> ?;

-- Where a life stands after the highest of its versions.
-- name: add_life
INSERT INTO life (job, life, version, ended) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET version = excluded.version, ended = excluded.ended WHERE excluded.version > version;

-- name: add_key
INSERT INTO asked (scope, key, job, life) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: add_damage
INSERT INTO damage (job, reason) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: next_damaged
SELECT job, reason FROM damage WHERE job > ? ORDER BY job LIMIT ?;

-- name: is_there
SELECT 1 FROM record WHERE job = ? AND version = ? AND at IN (?, ?);

-- name: count_records
SELECT count(*) FROM record;

-- name: next_lives
SELECT job, life, ended FROM life WHERE (life, job) > (?, ?) AND job NOT IN (SELECT d.job FROM damage d) ORDER BY life, job LIMIT ?;

-- name: records_of
SELECT body FROM record WHERE job = ? AND life = ? ORDER BY version;

-- name: rivals
SELECT job, life, ended FROM life WHERE job = :job AND life <> :life
UNION
SELECT o.job, o.life, l.ended FROM asked a JOIN asked o ON o.scope = a.scope AND o.key = a.key AND (o.job, o.life) <> (a.job, a.life)
JOIN life l ON l.job = o.job AND l.life = o.life WHERE a.job = :job AND a.life = :life;

-- name: last_life
SELECT job, life, ended FROM life WHERE job = ? ORDER BY life DESC LIMIT 1;
