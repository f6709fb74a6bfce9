"""Benches of serving: the scheduler, the simulator, the engine."""
