"""Agent runs: one run is a job of lifecycle `run`, which an orchestrator drives through four steps."""
