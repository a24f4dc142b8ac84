-- Fewer look-ups for each event. The guards refuse what they refused before; where they stood in two triggers, one of them has both.

-- The event moves its job, and the job's own guard below checks the step: it has the row before and after, which this one would look up.
DROP TRIGGER trellis_event_is_the_transition;
CREATE TRIGGER trellis_event_is_the_transition AFTER INSERT ON trellis_event BEGIN
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
    slot = CASE WHEN ckey IS NULL OR new.place NOT IN (1, 4) THEN NULL WHEN slot IS NOT NULL THEN slot ELSE coalesce(
      (SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM trellis_job t WHERE t.ckey = trellis_job.ckey AND t.slot = 0)),
      (SELECT min(t.slot) + 1 FROM trellis_job t WHERE t.ckey = trellis_job.ckey AND t.slot IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM trellis_job n WHERE n.ckey = t.ckey AND n.slot = t.slot + 1))) END,
    deaths = iif(new.generation > generation, 0, deaths)
  WHERE id = new.job;
  SELECT raise(ABORT, 'trellis: no such job') WHERE changes() = 0;
END;

-- A job moves only by an event that is its next and makes a declared step. The condition is a step that needs no dead letter, in one look at
-- the event and its arrow; whatever else comes is looked at below, which says what is wrong with it.
DROP TRIGGER trellis_job_moves_with_its_event;
CREATE TRIGGER trellis_job_moves_with_its_event BEFORE UPDATE OF state, version, generation, attempt, seq ON trellis_job
WHEN NOT EXISTS (
  SELECT 1 FROM trellis_event e
  CROSS JOIN trellis_arrow a ON a.id = ((old.lifecycle * 16 + old.state) * 16 + new.state) * 256 + e.type
  WHERE e.seq = new.seq AND e.job = old.id AND e.version = new.version AND e.source = old.state AND e.target = new.state
    AND e.generation = new.generation AND e.attempt = new.attempt AND e.place = new.place AND e.epoch = new.epoch
    AND new.version = old.version + 1 AND new.seq > old.seq
    AND a.roles >> e.role & 1 AND a.places >> e.place & 1 AND e.epoch >= old.epoch + a.grants AND NOT a.dead_letter
    AND (e.place <> 4 OR e.wait IS NOT NULL)
    AND e.generation = old.generation + (a.opens = 2)
    AND e.attempt = CASE a.opens WHEN 0 THEN old.attempt WHEN 1 THEN old.attempt + 1 ELSE 0 END
    AND (a.opens <> 0 OR a.rise >= 0))
BEGIN
  SELECT CASE
    WHEN e.seq IS NULL THEN raise(ABORT, 'trellis: a job changes state only by its event')
    WHEN e.version <> old.version + 1 THEN raise(ABORT, 'trellis: version gap or second event for a version')
    WHEN e.source <> old.state THEN raise(ABORT, 'trellis: the job is not in the state the event leaves')
    WHEN a.id IS NULL THEN raise(ABORT, 'trellis: transition not declared')
    WHEN a.roles >> e.role & 1 = 0 THEN raise(ABORT, 'trellis: transition not allowed for this role')
    WHEN e.generation <> CASE a.opens WHEN 2 THEN old.generation + 1 ELSE old.generation END
      OR e.attempt <> CASE a.opens WHEN 0 THEN old.attempt WHEN 1 THEN old.attempt + 1 ELSE 0 END
      OR (a.opens = 0 AND a.rise < 0) THEN raise(ABORT, 'trellis: progress (generation, attempt, rank) is wrong')
    WHEN a.places >> e.place & 1 = 0 THEN raise(ABORT, 'trellis: the place does not fit the state')
    WHEN e.epoch < old.epoch + a.grants THEN raise(ABORT, 'trellis: the epoch must rise with a claim and never fall')
    WHEN a.dead_letter AND NOT EXISTS (SELECT 1 FROM trellis_dead_letter d WHERE d.job = e.job AND d.version = e.version)
      THEN raise(ABORT, 'trellis: a dead letter is required')
    WHEN e.place = 4 AND e.wait IS NULL THEN raise(ABORT, 'trellis: a lease needs a length')
    WHEN e.seq <= old.seq THEN raise(ABORT, 'trellis: events are appended')
  END
  FROM (SELECT 1) LEFT JOIN trellis_event e ON e.seq = new.seq AND e.job = old.id AND e.version = new.version
    AND e.target = new.state AND e.generation = new.generation AND e.attempt = new.attempt AND e.place = new.place AND e.epoch = new.epoch
  LEFT JOIN trellis_arrow a ON a.id = ((old.lifecycle * 16 + e.source) * 16 + e.target) * 256 + e.type;
END;

-- Without an event, a job changes its place within its state, and raises its epoch with a lease. With one, the guard above has looked at both.
-- A slot is free, below the limit, and while slots beyond a lowered limit are still taken the count decides.
DROP TRIGGER trellis_job_place_fits;
DROP TRIGGER trellis_job_slot_within_limit;
CREATE TRIGGER trellis_job_place_fits BEFORE UPDATE OF place, epoch, slot ON trellis_job
WHEN (new.version = old.version AND (new.epoch < old.epoch OR old.place <> new.place))
  OR (new.slot IS NOT NULL AND new.slot IS NOT old.slot)
BEGIN
  SELECT CASE
    WHEN new.epoch < old.epoch THEN raise(ABORT, 'trellis: the epoch never falls')
    WHEN old.place <> new.place AND (SELECT places FROM trellis_state WHERE id = new.lifecycle * 16 + new.state) >> new.place & 1 = 0
      THEN raise(ABORT, 'trellis: the place does not fit the state')
    WHEN old.place <> new.place AND (old.place = 4 OR new.place = 4) AND new.epoch = old.epoch
      THEN raise(ABORT, 'trellis: taking and losing a lease raise the epoch')
  END
  WHERE new.version = old.version;
  SELECT CASE
    WHEN k.id IS NULL OR new.slot >= k.slots THEN raise(ABORT, 'trellis: concurrency key at its limit')
    WHEN EXISTS (SELECT 1 FROM trellis_job WHERE ckey = new.ckey AND slot = new.slot AND id <> new.id)
      THEN raise(ABORT, 'trellis: concurrency slot taken')
    WHEN EXISTS (SELECT 1 FROM trellis_job WHERE ckey = new.ckey AND slot >= k.slots)
      AND (SELECT count(*) FROM trellis_job WHERE ckey = new.ckey AND slot IS NOT NULL) >= k.slots
      THEN raise(ABORT, 'trellis: concurrency key at its limit')
  END FROM (SELECT 1) LEFT JOIN trellis_concurrency_key k ON k.id = new.ckey
  WHERE new.slot IS NOT NULL AND new.slot IS NOT old.slot;
END;

-- An event whose number is given replaces none. Looked at in the same trigger as the completion that finalizes an artifact.
DROP TRIGGER trellis_event_is_new;
DROP TRIGGER trellis_event_finalizes;
CREATE TRIGGER trellis_event_finalizes BEFORE INSERT ON trellis_event
WHEN EXISTS (SELECT 1 FROM trellis_finalizer f WHERE f.step = (new.source * 16 + new.target) * 256 + new.type
    AND f.lifecycle = (SELECT lifecycle FROM trellis_job WHERE id = new.job))
  OR (new.seq > 0 AND EXISTS (SELECT 1 FROM trellis_event WHERE seq = new.seq))
BEGIN
  SELECT raise(ABORT, 'trellis: an event is never replaced') WHERE EXISTS (SELECT 1 FROM trellis_event WHERE seq = new.seq);
  SELECT CASE
    WHEN r.job IS NULL AND NOT f.completes THEN raise(ABORT, 'trellis: an artifact is finalized only by the completion of its job')
    WHEN r.job IS NULL AND NOT EXISTS (
      SELECT 1 FROM trellis_finalizing n JOIN trellis_job a ON a.id = n.artifact
      JOIN trellis_finalizer d ON NOT d.completes AND d.lifecycle = a.lifecycle AND d.source = a.state
      JOIN trellis_submission c ON c.id = a.id AND c.parent = s.job_id
      WHERE n.job = new.job) THEN raise(ABORT, 'trellis: a job completes only with a staged artifact of its own')
    WHEN NOT f.completes AND s.parent IS NULL THEN raise(ABORT, 'trellis: an artifact belongs to a job')
    WHEN (r.job IS NULL OR NOT f.completes) AND EXISTS (
      SELECT 1 FROM trellis_submission c JOIN trellis_job a ON a.id = c.id
      JOIN trellis_finalizer d ON NOT d.completes AND d.lifecycle = a.lifecycle
      JOIN trellis_event e ON e.job = a.id AND e.source = d.source AND e.target = d.target AND e.type = d.type
      WHERE c.parent = iif(f.completes, s.job_id, s.parent) AND c.id <> new.job)
      THEN raise(ABORT, 'trellis: another artifact of the job is final')
    WHEN NOT f.completes AND EXISTS (
      SELECT 1 FROM trellis_submission o JOIN trellis_job j ON j.id = o.id WHERE o.job_id = s.parent AND NOT EXISTS (
        SELECT 1 FROM trellis_finalizer d WHERE d.completes AND d.lifecycle = j.lifecycle AND d.target = j.state))
      THEN raise(ABORT, 'trellis: the job of this artifact has not completed')
  END
  FROM trellis_finalizer f LEFT JOIN trellis_submission s ON s.id = new.job LEFT JOIN trellis_restoring r ON r.job = new.job
  WHERE f.step = (new.source * 16 + new.target) * 256 + new.type;
  INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, cause)
  SELECT a.id, a.version + 1, f.type, f.source, f.target, new.role, new.actor, a.epoch, a.generation, a.attempt, new.at, 2,
    'finalized by ' || (SELECT job_id FROM trellis_submission WHERE id = new.job)
  FROM trellis_finalizing n JOIN trellis_job a ON a.id = n.artifact
  JOIN trellis_finalizer f ON NOT f.completes AND f.lifecycle = a.lifecycle AND f.source = a.state
  WHERE n.job = new.job AND NOT EXISTS (SELECT 1 FROM trellis_restoring WHERE job = new.job);
  DELETE FROM trellis_finalizing WHERE job = new.job;
END;
