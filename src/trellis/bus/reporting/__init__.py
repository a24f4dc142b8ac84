"""What comes back from workers: results, progress and signs of life."""
