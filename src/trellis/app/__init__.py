"""Puts the application together: reads the settings and wires the parts."""
