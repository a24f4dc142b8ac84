"""Agent memory: an agent's knowledge between its runs, kept in git. Only applied proposals change it."""
