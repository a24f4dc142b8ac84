-- How many jobs of a concurrency key wait is asked at every submit that bounds them; what has ended must not be read for it.
CREATE INDEX trellis_job_waiting ON trellis_job (ckey) WHERE ckey IS NOT NULL AND place < 4;
