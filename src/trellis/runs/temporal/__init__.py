"""Runs as workflows of a Temporal server (decision 0034)."""
