-- The SQLite ledger.
--
-- A job is two rows with one id: `submission` is what was asked (cold, never changes), `job` is where it stands (narrow,
-- rewritten by every step). `event` is the history and the feed: there is one writer at a time, so `seq` is commit order.
--
-- What holds, for every connection that does not drop triggers:
--   * Inserting an event IS the transition. The trigger checks it against `arrow` and moves the job; there is no other way
--     to change state, version, generation or attempt.
--   * Versions have no gap, an event never changes, epochs never fall, an ended job moves only as declared.
--   * Every place fits its state, and a keyed job is ready or held only with a slot of its key below the key's limit.
--
-- Times are microseconds since 1970 in UTC. Places: 0 not submitted yet, 1 ready, 2 resting, 3 parked, 4 held,
-- 5 ended well, 6 ended otherwise.

CREATE TABLE trellis_meta (key TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

-- The contract: the lifecycles as data, loaded from trellis.lifecycles. -----------------------------------------------

CREATE TABLE trellis_lifecycle (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, swept_by INTEGER NOT NULL
) STRICT;
CREATE TABLE trellis_role (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE trellis_event_type (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;

-- id = lifecycle * 16 + state; `places` is a bit mask of the places a job may be in while it has this state.
CREATE TABLE trellis_state (
  id INTEGER PRIMARY KEY, lifecycle INTEGER NOT NULL, name TEXT NOT NULL, phase INTEGER NOT NULL, rank INTEGER NOT NULL,
  places INTEGER NOT NULL, dead_letter INTEGER NOT NULL, UNIQUE (lifecycle, name)
) STRICT;

-- One row for each declared (lifecycle, source, target, event type), found by one number:
-- ((lifecycle * 16 + source) * 16 + target) * 256 + event type. `roles` is a bit mask; `places` as in the target's state
-- at the moment of entry; `grants` when the target is held and the source is not.
CREATE TABLE trellis_arrow (
  id INTEGER PRIMARY KEY, roles INTEGER NOT NULL, opens INTEGER NOT NULL, rise INTEGER NOT NULL, places INTEGER NOT NULL,
  dead_letter INTEGER NOT NULL, grants INTEGER NOT NULL
) STRICT;

-- Names said once. ----------------------------------------------------------------------------------------------------

CREATE TABLE trellis_job_type (
  id INTEGER PRIMARY KEY, lifecycle INTEGER NOT NULL, name TEXT NOT NULL, UNIQUE (lifecycle, name)
) STRICT;
CREATE TABLE trellis_actor (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE trellis_concurrency_key (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL CHECK (slots > 0),
  changed_by INTEGER                    -- the actor who set the limit; NULL when the first submit did
) STRICT;

-- Jobs. ---------------------------------------------------------------------------------------------------------------

CREATE TABLE trellis_job (
  id INTEGER PRIMARY KEY,
  lifecycle INTEGER NOT NULL,
  type INTEGER NOT NULL,
  state INTEGER NOT NULL DEFAULT 0,
  place INTEGER NOT NULL DEFAULT 0,
  version INTEGER NOT NULL DEFAULT 0,
  epoch INTEGER NOT NULL DEFAULT 0,
  generation INTEGER NOT NULL DEFAULT 0,
  attempt INTEGER NOT NULL DEFAULT 0,
  prio INTEGER NOT NULL,
  pos INTEGER NOT NULL DEFAULT 0,       -- where in the history it became claimable: the order among equals
  max_attempts INTEGER NOT NULL,
  deaths INTEGER NOT NULL DEFAULT 0,
  seq INTEGER NOT NULL DEFAULT 0,       -- its last event
  length INTEGER,                       -- of its lease: a renewal sets until = now + length
  until INTEGER,                        -- when the lease ends, or ended last in this generation
  owner INTEGER,                        -- actor who holds it, or held it last in this generation
  due_at INTEGER,
  deadline_at INTEGER,
  cancel_at INTEGER,                    -- a soft cancel was asked for; at this time it turns hard
  ckey INTEGER,
  slot INTEGER,
  compensates INTEGER,
  CHECK (place BETWEEN 0 AND 6),
  CHECK ((slot IS NOT NULL) = (ckey IS NOT NULL AND place IN (1, 4))),
  CHECK (slot IS NULL OR slot >= 0),
  CHECK (place <> 4 OR (until IS NOT NULL AND length IS NOT NULL AND owner IS NOT NULL))
) STRICT;

CREATE INDEX trellis_job_ready ON trellis_job (type, prio, pos) WHERE place = 1;
CREATE INDEX trellis_job_resting ON trellis_job (due_at) WHERE place = 2;
CREATE INDEX trellis_job_parked ON trellis_job (ckey, prio, pos) WHERE place = 3;
CREATE INDEX trellis_job_held ON trellis_job (until) WHERE place = 4;
CREATE INDEX trellis_job_unlucky ON trellis_job (type, id) WHERE place = 6;
CREATE INDEX trellis_job_deadline ON trellis_job (deadline_at) WHERE deadline_at IS NOT NULL AND place < 5;
CREATE INDEX trellis_job_cancel ON trellis_job (cancel_at) WHERE cancel_at IS NOT NULL AND place = 4;
CREATE UNIQUE INDEX trellis_job_slot ON trellis_job (ckey, slot) WHERE slot IS NOT NULL;

CREATE TABLE trellis_submission (
  id INTEGER PRIMARY KEY,
  job_id TEXT NOT NULL UNIQUE,
  created_at INTEGER NOT NULL,
  max_attempts INTEGER NOT NULL,
  max_deaths INTEGER NOT NULL,
  correlation TEXT,                     -- NULL means the job's own id
  trace TEXT,
  parent TEXT,
  payload BLOB NOT NULL
) STRICT;

CREATE INDEX trellis_submission_correlation ON trellis_submission (correlation) WHERE correlation IS NOT NULL;

CREATE TABLE trellis_event (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  job INTEGER NOT NULL,
  version INTEGER NOT NULL,
  type INTEGER NOT NULL,
  source INTEGER NOT NULL,
  target INTEGER NOT NULL,
  role INTEGER NOT NULL,
  actor INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  at INTEGER NOT NULL,
  place INTEGER NOT NULL,
  wait INTEGER,                         -- held: the lease's length; resting: how long, NULL until someone moves it
  cause TEXT,
  data BLOB,
  request TEXT                          -- the id of the request that asked for it, to answer a second one alike
) STRICT;

CREATE UNIQUE INDEX trellis_event_job ON trellis_event (job, version);
CREATE INDEX trellis_event_type_at ON trellis_event (type, at);
CREATE INDEX trellis_event_request ON trellis_event (request) WHERE request IS NOT NULL;

CREATE TABLE trellis_dead_letter (
  job INTEGER NOT NULL,
  version INTEGER NOT NULL,
  reason TEXT NOT NULL CHECK (reason IN ('parse_error', 'validation_failed', 'dependency_unavailable', 'timeout',
    'exhausted_retries', 'policy_violation', 'infrastructure_failure', 'compensation_failed')),
  stage TEXT NOT NULL CHECK (stage IN ('fetch', 'input', 'exec', 'output', 'commit')),
  last_error TEXT NOT NULL CHECK (last_error <> ''),
  attempts INTEGER NOT NULL CHECK (attempts > 0),
  last_owner TEXT,
  last_lease_expires_at INTEGER,
  at INTEGER NOT NULL,
  CHECK ((last_owner IS NULL) = (last_lease_expires_at IS NULL)),
  PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;

-- Around a job. -------------------------------------------------------------------------------------------------------

CREATE TABLE trellis_idempotency (
  scope TEXT NOT NULL, key TEXT NOT NULL, job INTEGER NOT NULL, fingerprint BLOB NOT NULL, at INTEGER NOT NULL,
  PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX trellis_idempotency_job ON trellis_idempotency (job);
CREATE TABLE trellis_result (job INTEGER PRIMARY KEY, body BLOB NOT NULL, expires_at INTEGER) STRICT;
CREATE INDEX trellis_result_expiry ON trellis_result (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE trellis_checkpoint (job INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, at INTEGER NOT NULL, body BLOB NOT NULL) STRICT;
CREATE TABLE trellis_journal (
  job INTEGER NOT NULL, entry TEXT NOT NULL, epoch INTEGER NOT NULL, at INTEGER NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (job, entry)
) STRICT, WITHOUT ROWID;
CREATE TABLE trellis_signal (
  id INTEGER PRIMARY KEY, job INTEGER NOT NULL, type TEXT NOT NULL, at INTEGER NOT NULL, data BLOB
) STRICT;
CREATE INDEX trellis_signal_job ON trellis_signal (job, id);

-- What a claim id was given, so that the same request asked again gets the same leases: [[job, epoch], …].
CREATE TABLE trellis_claim (
  claim_id TEXT PRIMARY KEY, at INTEGER NOT NULL, leases TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX trellis_claim_age ON trellis_claim (at);

CREATE TABLE trellis_type_control (
  name TEXT PRIMARY KEY, paused INTEGER NOT NULL DEFAULT 0, rate REAL, burst INTEGER NOT NULL DEFAULT 1,
  tokens REAL NOT NULL DEFAULT 0, filled_at INTEGER NOT NULL DEFAULT 0,
  changed_by INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE trellis_worker (name TEXT PRIMARY KEY, actor INTEGER NOT NULL, seen_at INTEGER NOT NULL, info BLOB) STRICT, WITHOUT ROWID;

-- The one way out of the ledger: a row here removes an ended job with everything that is its own.
CREATE TABLE trellis_purge (job INTEGER PRIMARY KEY) STRICT;

-- Guards. -------------------------------------------------------------------------------------------------------------

CREATE TRIGGER trellis_event_is_the_transition AFTER INSERT ON trellis_event BEGIN
  SELECT CASE
    WHEN j.id IS NULL THEN raise(ABORT, 'trellis: no such job')
    WHEN new.version <> j.version + 1 THEN raise(ABORT, 'trellis: version gap or second event for a version')
    WHEN new.source <> j.state THEN raise(ABORT, 'trellis: the job is not in the state the event leaves')
    WHEN a.id IS NULL THEN raise(ABORT, 'trellis: transition not declared')
    WHEN a.roles >> new.role & 1 = 0 THEN raise(ABORT, 'trellis: transition not allowed for this role')
    WHEN new.generation <> CASE a.opens WHEN 2 THEN j.generation + 1 ELSE j.generation END
      OR new.attempt <> CASE a.opens WHEN 0 THEN j.attempt WHEN 1 THEN j.attempt + 1 ELSE 0 END
      OR (a.opens = 0 AND a.rise < 0) THEN raise(ABORT, 'trellis: progress (generation, attempt, rank) is wrong')
    WHEN a.places >> new.place & 1 = 0 THEN raise(ABORT, 'trellis: the place does not fit the state')
    WHEN new.epoch < j.epoch + a.grants THEN raise(ABORT, 'trellis: the epoch must rise with a claim and never fall')
    WHEN a.dead_letter AND NOT EXISTS (SELECT 1 FROM trellis_dead_letter d WHERE d.job = new.job AND d.version = new.version)
      THEN raise(ABORT, 'trellis: a dead letter is required')
    WHEN new.place = 4 AND new.wait IS NULL THEN raise(ABORT, 'trellis: a lease needs a length')
    WHEN new.seq <= j.seq THEN raise(ABORT, 'trellis: events are appended')
  END
  FROM (SELECT 1) LEFT JOIN trellis_job j ON j.id = new.job
  LEFT JOIN trellis_arrow a ON a.id = ((j.lifecycle * 16 + new.source) * 16 + new.target) * 256 + new.type;

  UPDATE trellis_job SET
    state = new.target, place = new.place, version = new.version, epoch = new.epoch, generation = new.generation,
    attempt = new.attempt, seq = new.seq,
    pos = iif(new.place IN (1, 3), new.seq, pos),
    length = iif(new.place = 4, new.wait, NULL),
    until = CASE WHEN new.place = 4 THEN new.at + new.wait WHEN new.generation > generation THEN NULL ELSE until END,
    owner = CASE WHEN new.place = 4 AND place <> 4 THEN new.actor WHEN new.generation > generation THEN NULL ELSE owner END,
    due_at = iif(new.place = 2, new.at + new.wait, NULL),
    cancel_at = iif(new.place = 4, cancel_at, NULL),
    -- Into a lease straight from rest: the lowest free slot; the guard below refuses one beyond the limit.
    slot = CASE WHEN new.place NOT IN (1, 4) OR ckey IS NULL THEN NULL WHEN slot IS NOT NULL THEN slot ELSE coalesce(
      (SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM trellis_job t WHERE t.ckey = trellis_job.ckey AND t.slot = 0)),
      (SELECT min(t.slot) + 1 FROM trellis_job t WHERE t.ckey = trellis_job.ckey AND t.slot IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM trellis_job n WHERE n.ckey = t.ckey AND n.slot = t.slot + 1))) END,
    deaths = iif(new.generation > generation, 0, deaths)
  WHERE id = new.job;
END;

CREATE TRIGGER trellis_event_is_new BEFORE INSERT ON trellis_event WHEN EXISTS (SELECT 1 FROM trellis_event WHERE seq = new.seq) BEGIN
  SELECT raise(ABORT, 'trellis: an event is never replaced');
END;
CREATE TRIGGER trellis_event_never_changes BEFORE UPDATE ON trellis_event BEGIN
  SELECT raise(ABORT, 'trellis: an event never changes');
END;
CREATE TRIGGER trellis_event_stays BEFORE DELETE ON trellis_event WHEN NOT EXISTS (SELECT 1 FROM trellis_purge WHERE job = old.job) BEGIN
  SELECT raise(ABORT, 'trellis: an event leaves only with its job, through purge');
END;

-- Fires for the transition's own update too, and finds the event there; a direct update finds none, because an event of
-- the next version would already have moved the job.
CREATE TRIGGER trellis_job_moves_with_its_event BEFORE UPDATE OF state, version, generation, attempt, seq ON trellis_job
WHEN new.version <> old.version + 1 OR NOT EXISTS (
  SELECT 1 FROM trellis_event e WHERE e.seq = new.seq AND e.job = old.id AND e.version = new.version AND e.source = old.state
    AND e.target = new.state AND e.generation = new.generation AND e.attempt = new.attempt)
BEGIN
  SELECT raise(ABORT, 'trellis: a job changes state only by its event');
END;

CREATE TRIGGER trellis_job_place_fits BEFORE UPDATE OF place, epoch ON trellis_job
WHEN new.epoch < old.epoch
  OR (old.place <> new.place AND (old.place = 4 OR new.place = 4) AND new.version = old.version AND new.epoch = old.epoch)
  OR (old.place <> new.place AND (SELECT places FROM trellis_state WHERE id = new.lifecycle * 16 + new.state) >> new.place & 1 = 0)
BEGIN
  SELECT CASE
    WHEN new.epoch < old.epoch THEN raise(ABORT, 'trellis: the epoch never falls')
    WHEN (SELECT places FROM trellis_state WHERE id = new.lifecycle * 16 + new.state) >> new.place & 1 = 0
      THEN raise(ABORT, 'trellis: the place does not fit the state')
    ELSE raise(ABORT, 'trellis: taking and losing a lease raise the epoch')
  END;
END;

-- A slot is free, below the limit, and while slots beyond a lowered limit are still taken the count decides.
CREATE TRIGGER trellis_job_slot_within_limit BEFORE UPDATE OF slot ON trellis_job WHEN new.slot IS NOT NULL AND new.slot IS NOT old.slot
BEGIN
  SELECT CASE
    WHEN k.id IS NULL OR new.slot >= k.slots THEN raise(ABORT, 'trellis: concurrency key at its limit')
    WHEN EXISTS (SELECT 1 FROM trellis_job WHERE ckey = new.ckey AND slot = new.slot AND id <> new.id)
      THEN raise(ABORT, 'trellis: concurrency slot taken')
    WHEN EXISTS (SELECT 1 FROM trellis_job WHERE ckey = new.ckey AND slot >= k.slots)
      AND (SELECT count(*) FROM trellis_job WHERE ckey = new.ckey AND slot IS NOT NULL) >= k.slots
      THEN raise(ABORT, 'trellis: concurrency key at its limit')
  END FROM (SELECT 1) LEFT JOIN trellis_concurrency_key k ON k.id = new.ckey;
END;

CREATE TRIGGER trellis_job_identity_never_changes BEFORE UPDATE OF id, lifecycle, type, ckey, compensates ON trellis_job BEGIN
  SELECT raise(ABORT, 'trellis: what a job is never changes');
END;
CREATE TRIGGER trellis_job_begins_unsubmitted BEFORE INSERT ON trellis_job
WHEN new.state <> 0 OR new.place <> 0 OR new.version <> 0 OR new.epoch <> 0 OR new.generation <> 0 OR new.attempt <> 0
  OR new.slot IS NOT NULL OR EXISTS (SELECT 1 FROM trellis_job WHERE id = new.id)
BEGIN
  SELECT raise(ABORT, 'trellis: a job begins without a state; its first event submits it');
END;
CREATE TRIGGER trellis_job_stays BEFORE DELETE ON trellis_job WHEN NOT EXISTS (SELECT 1 FROM trellis_purge WHERE job = old.id) BEGIN
  SELECT raise(ABORT, 'trellis: a job leaves only through purge');
END;

CREATE TRIGGER trellis_submission_never_changes BEFORE UPDATE ON trellis_submission BEGIN
  SELECT raise(ABORT, 'trellis: a submission never changes');
END;
CREATE TRIGGER trellis_submission_is_new BEFORE INSERT ON trellis_submission
WHEN EXISTS (SELECT 1 FROM trellis_submission WHERE job_id = new.job_id OR id = new.id) BEGIN
  SELECT raise(ABORT, 'trellis: a submission is never replaced');
END;
CREATE TRIGGER trellis_submission_stays BEFORE DELETE ON trellis_submission WHEN NOT EXISTS (SELECT 1 FROM trellis_purge WHERE job = old.id) BEGIN
  SELECT raise(ABORT, 'trellis: a submission leaves only with its job, through purge');
END;

CREATE TRIGGER trellis_dead_letter_precedes_its_event BEFORE INSERT ON trellis_dead_letter
WHEN (SELECT version + 1 FROM trellis_job WHERE id = new.job) IS NOT new.version BEGIN
  SELECT raise(ABORT, 'trellis: a dead letter belongs to the step about to be made');
END;
CREATE TRIGGER trellis_dead_letter_never_changes BEFORE UPDATE ON trellis_dead_letter BEGIN
  SELECT raise(ABORT, 'trellis: a dead letter never changes');
END;
CREATE TRIGGER trellis_dead_letter_stays BEFORE DELETE ON trellis_dead_letter WHEN NOT EXISTS (SELECT 1 FROM trellis_purge WHERE job = old.job) BEGIN
  SELECT raise(ABORT, 'trellis: a dead letter leaves only with its job, through purge');
END;

CREATE TRIGGER trellis_purge_is_of_ended_jobs BEFORE INSERT ON trellis_purge
WHEN NOT EXISTS (SELECT 1 FROM trellis_job WHERE id = new.job AND place >= 5) BEGIN
  SELECT raise(ABORT, 'trellis: only an ended job can be purged');
END;
CREATE TRIGGER trellis_purge_removes AFTER INSERT ON trellis_purge BEGIN
  -- A job's number is never given out again: a lease of the purged job must not fit another one. AUTOINCREMENT sees to
  -- the feed's positions.
  INSERT INTO trellis_meta (key, value) VALUES ('last_purged', new.job)
    ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value);
  DELETE FROM trellis_event WHERE job = new.job;
  DELETE FROM trellis_dead_letter WHERE job = new.job;
  DELETE FROM trellis_idempotency WHERE job = new.job;
  DELETE FROM trellis_result WHERE job = new.job;
  DELETE FROM trellis_checkpoint WHERE job = new.job;
  DELETE FROM trellis_journal WHERE job = new.job;
  DELETE FROM trellis_signal WHERE job = new.job;
  DELETE FROM trellis_submission WHERE id = new.job;
  DELETE FROM trellis_job WHERE id = new.job;
  DELETE FROM trellis_purge WHERE job = new.job;
END;

-- The contract changes only while the program that loads it says so (meta.contract_loading).
CREATE TRIGGER trellis_arrow_is_contract_i BEFORE INSERT ON trellis_arrow WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_arrow_is_contract_u BEFORE UPDATE ON trellis_arrow WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_arrow_is_contract_d BEFORE DELETE ON trellis_arrow WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_state_is_contract_i BEFORE INSERT ON trellis_state WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_state_is_contract_u BEFORE UPDATE ON trellis_state WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
CREATE TRIGGER trellis_state_is_contract_d BEFORE DELETE ON trellis_state WHEN NOT EXISTS (SELECT 1 FROM trellis_meta WHERE key = 'contract_loading')
BEGIN SELECT raise(ABORT, 'trellis: lifecycles are declared in code'); END;
