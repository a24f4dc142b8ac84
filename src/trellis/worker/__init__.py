"""Applications with handlers for leased jobs, and the worker that runs them."""
