"""Agent runs: one run is a job of lifecycle `run`, driven through four steps by an orchestrator."""
