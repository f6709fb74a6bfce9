"""Faults of ranks that stay alive, injected: flips of memory, slow parts."""
