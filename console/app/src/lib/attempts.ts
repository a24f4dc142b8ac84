/** Attempts of a job, as people count them: those that were made, the present one included, of those allowed. */

export interface Counted {
  lifecycle: string;
  attempt: number;
  max_attempts: number;
  attempts_made?: number | null;
  attempts_allowed?: number | null;
}

/**
 * Such as `3/5`. A gateway of an older version answers without `attempts_allowed`: there the document of a queue job counts retries, so
 * it has one attempt more than `max_attempts`.
 */
export function attempts(job: Counted, separator = "/"): string {
  const allowed = job.attempts_allowed ?? job.max_attempts + (job.lifecycle === "queue-job" ? 1 : 0);
  return `${job.attempts_made ?? job.attempt + 1}${separator}${allowed}`;
}
