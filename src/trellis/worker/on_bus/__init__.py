"""Our own applications as workers of the bus: the same handlers, for jobs that come as orders."""
