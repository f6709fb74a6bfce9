"""Benches of serving."""
