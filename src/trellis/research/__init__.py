"""Queue jobs: take an agent's question to the NLM backend and bring back an artifact."""
