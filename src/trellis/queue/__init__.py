"""Queue jobs: context, a call of the NLM backend, an artifact; driven by the orchestration layer."""
