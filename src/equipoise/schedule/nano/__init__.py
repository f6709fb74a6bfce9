"""Schedules in which nano-batches of one iteration overlap on lanes."""
