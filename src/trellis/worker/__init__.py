"""User code on leased jobs: applications, and the worker that runs them."""
