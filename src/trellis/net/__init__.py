"""Outgoing connections to URLs that callers provide."""
