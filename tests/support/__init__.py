"""Fixtures that several tests share: made-up journals, runs, schedules, clusters."""
