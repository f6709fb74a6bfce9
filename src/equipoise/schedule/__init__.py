"""Schedules: what each rank sends, receives and computes, and in which order. No torch."""
