"""Trellis inside other libraries. Each module imports its library on use, so that none of them is a dependency."""
