"""The safety kernel: says before each dispatch whether a job may go (BUS-4, D45, D53)."""
