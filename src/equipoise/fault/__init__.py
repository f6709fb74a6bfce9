"""Faults of a run: what follows them, and how they are noticed."""
