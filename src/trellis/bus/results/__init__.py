"""What comes back from workers: results, progress and heartbeats."""
