"""Proposals: what an agent or a person wants changed, what a person decides, and doing it."""
