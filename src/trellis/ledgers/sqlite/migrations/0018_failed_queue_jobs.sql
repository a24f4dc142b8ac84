-- For service level objectives: the events that end a queue job badly. Other lifecycles have events of these types by the
-- hundred thousand, and an event does not say its lifecycle. The numbers are job_failed (5) into FAILED (8) and
-- job_dead_lettered (7) into DEAD (9): no other lifecycle has these steps, so the index stays small.
CREATE INDEX trellis_event_queue_failed ON trellis_event (type, at)
WHERE (type = 5 AND target = 8) OR (type = 7 AND target = 9);
