"""The NLM backend: its own HTTP service, which makes artifacts of queue jobs and answers grounded questions."""

from trellis.nlm_backend.app import create_backend_app
from trellis.nlm_backend.backend import BackendProcess, open_backend

__all__ = ["BackendProcess", "create_backend_app", "open_backend"]
