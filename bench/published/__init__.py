"""Benches of predictions beside published measurements."""
