"""The safety kernel: decides before each dispatch whether a job may be dispatched (BUS-4, D45, D53)."""
