"""Devices for tests: a machine that has some, a queue, ranks that stand in, a small calibration."""
