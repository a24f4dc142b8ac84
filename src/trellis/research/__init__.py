"""Research: queue jobs take an agent's question to the NLM backend and bring an artifact back."""
