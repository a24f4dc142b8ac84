"""Connections to addresses that somebody else chose."""
