"""The typed HTTP client of a gateway, for other programs.

Its retries are safe to repeat. `trellis.connect` creates one.
"""
