"""What follows from an end: retries, cascades, order, compensation, and what clients are told."""
