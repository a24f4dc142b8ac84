"""The NLM backend: a service of its own that makes an artifact for a job and answers grounded questions."""
