"""Agents: their definition files, the catalog, their sources, and the runtime that executes them."""
