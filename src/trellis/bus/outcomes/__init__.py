"""What follows from the end of a job: retries, cascades, order, compensation, and what clients are told."""
