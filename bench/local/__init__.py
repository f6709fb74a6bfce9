"""Benches of what runs here: on these cores, by this package's own code."""
