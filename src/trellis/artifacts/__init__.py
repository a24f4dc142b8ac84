"""Artifacts: what the NLM backend produces for a queue job. Immutable once the job is complete."""
