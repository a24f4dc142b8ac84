-- Every claim looks for jobs whose workers died: those that must run alone are handed out one at a time.
CREATE INDEX trellis_job_died ON trellis_job (place) WHERE deaths > 0;
