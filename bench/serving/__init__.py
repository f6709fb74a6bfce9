"""Serving: who waits for whom, and how fast the simulator is."""
