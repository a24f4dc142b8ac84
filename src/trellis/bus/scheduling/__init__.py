"""Scheduling: takes requests in, tracks workers, and dispatches jobs to them."""
