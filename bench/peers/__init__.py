"""Benches against other people's code, on the same rows or ranks."""
