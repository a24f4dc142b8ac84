"""What follows from the end of a job: retries, cancel cascades, step order, compensations, and messages to clients."""
