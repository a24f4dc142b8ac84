"""Runs the handlers of an application as a worker of the CAP bus."""
