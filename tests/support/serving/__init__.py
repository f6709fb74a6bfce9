"""Serving in tests: a price, and the engine's side of the scheduler."""
