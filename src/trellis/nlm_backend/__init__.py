"""The NLM backend: a separate HTTP service that produces artifacts for queue jobs and answers grounded questions."""

from trellis.nlm_backend.app import create_backend_app
from trellis.nlm_backend.backend import BackendProcess, open_backend

__all__ = ["BackendProcess", "create_backend_app", "open_backend"]
