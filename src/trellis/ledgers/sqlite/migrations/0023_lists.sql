-- Lists of jobs by type and state, newest first: all but those that are held, which are few. Claims and ends write here, no step between.
CREATE INDEX trellis_job_listed ON trellis_job (type, state, place) WHERE place IN (1, 2, 3, 5, 6);
CREATE INDEX trellis_dead_letter_reason ON trellis_dead_letter (reason, job, version);
