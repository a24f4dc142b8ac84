-- What is said about a job by others than its holder is counted before another one is kept.
CREATE INDEX trellis_signal_remark ON trellis_signal (job) WHERE type = 'job_result_refused';
