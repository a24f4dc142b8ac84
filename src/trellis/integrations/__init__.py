"""Trellis inside other libraries, and they inside a job. Each module imports its library on use: none is a dependency."""
