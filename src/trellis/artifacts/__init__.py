"""Artifacts: what the NLM backend makes for a job, immutable from the moment the job is complete."""
