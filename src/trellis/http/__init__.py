"""The client of a gateway, for other programs: typed, with retries that are safe to repeat. `trellis.connect` makes one."""
